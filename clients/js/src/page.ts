/** What a page tells of its reader. Without a page (Node) nothing is known and nothing ever happens. */
export interface Page {
  /** Whether the page is hidden; `undefined` where there is no page. */
  readonly hidden: boolean | undefined;
  /** Calls `run` whenever the page is hidden or shown. Returns what stops it. */
  onVisibility(run: () => void): () => void;
  /** Calls `run` when the page goes away. Returns what stops it. */
  onLeave(run: () => void): () => void;
  /** Sends text that may outlive the page (`text/plain`). False if the browser did not take it. */
  beacon(url: string, body: string): boolean;
}

const nowhere: Page = {
  hidden: undefined,
  onVisibility: () => () => {},
  onLeave: () => () => {},
  beacon: () => false,
};

const browser: Page = {
  get hidden() {
    return document.visibilityState === "hidden";
  },
  onVisibility: (run) => listen(document, "visibilitychange", run),
  onLeave: (run) => listen(window, "pagehide", run),
  beacon: (url, body) => navigator.sendBeacon(url, new Blob([body], { type: "text/plain" })),
};

/** The page this code runs in, if it runs in one. */
export const systemPage: Page = typeof document === "undefined" ? nowhere : browser;

function listen(target: EventTarget, event: string, run: () => void): () => void {
  target.addEventListener(event, run);
  return () => target.removeEventListener(event, run);
}
