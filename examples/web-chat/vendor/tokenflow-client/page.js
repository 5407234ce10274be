const nowhere = {
    hidden: undefined,
    onVisibility: () => () => { },
    onLeave: () => () => { },
    beacon: () => false,
};
const browser = {
    get hidden() {
        return document.visibilityState === "hidden";
    },
    onVisibility: (run) => listen(document, "visibilitychange", run),
    onLeave: (run) => listen(window, "pagehide", run),
    beacon: (url, body) => navigator.sendBeacon(url, new Blob([body], { type: "text/plain" })),
};
/** The page this code runs in, if it runs in one. */
export const systemPage = typeof document === "undefined" ? nowhere : browser;
function listen(target, event, run) {
    target.addEventListener(event, run);
    return () => target.removeEventListener(event, run);
}
