/** What is paused while its reader has scrolled back: a `PacedRenderer`, for example. */
export interface Pausable {
  pause(reason: string): void;
  resume(reason: string): void;
}

export interface ScrollOptions {
  /** How far from the end still counts as reading at the end, in CSS pixels. Default: 48. */
  readonly marginPx?: number;
}

const REASON = "scroll";
const MARGIN_PX = 48; // two lines

/**
 * Pauses the showing while its reader has scrolled up in this element, and resumes it at the end.
 *
 * Only a movement upwards counts: text that grows below, or a container that changes its size, does not.
 * Returns what stops the watching, and ends a pause that came of it.
 */
export function observeScroll(element: Element, target: Pausable, options: ScrollOptions = {}): () => void {
  const { marginPx = MARGIN_PX } = options;
  let lastTopPx = element.scrollTop;
  const look = (): void => {
    const { scrollTop, scrollHeight, clientHeight } = element;
    const belowPx = scrollHeight - clientHeight - scrollTop;
    if (belowPx <= marginPx) target.resume(REASON);
    else if (scrollTop < lastTopPx) target.pause(REASON);
    lastTopPx = scrollTop;
  };
  element.addEventListener("scroll", look, { passive: true });
  return () => {
    element.removeEventListener("scroll", look);
    target.resume(REASON);
  };
}
