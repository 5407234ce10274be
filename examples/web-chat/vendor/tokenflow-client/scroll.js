const REASON = "scroll";
const MARGIN_PX = 48; // two lines
/**
 * Pauses the showing while its reader has scrolled up in this element, and resumes it at the end.
 *
 * Only a movement upwards counts: text that grows below, or a container that changes its size, does not.
 * Returns what stops the watching, and ends a pause that came of it.
 */
export function observeScroll(element, target, options = {}) {
    const { marginPx = MARGIN_PX } = options;
    let lastTopPx = element.scrollTop;
    const look = () => {
        const { scrollTop, scrollHeight, clientHeight } = element;
        const belowPx = scrollHeight - clientHeight - scrollTop;
        if (belowPx <= marginPx)
            target.resume(REASON);
        else if (scrollTop < lastTopPx)
            target.pause(REASON);
        lastTopPx = scrollTop;
    };
    element.addEventListener("scroll", look, { passive: true });
    return () => {
        element.removeEventListener("scroll", look);
        target.resume(REASON);
    };
}
