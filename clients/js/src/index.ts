export { type Clock, type Frames, systemClock, systemFrames } from "./clock.js";
export { readContent, StreamError } from "./content.js";
export { createFetch, type FetchOptions, streamOf } from "./fetch.js";
export type { Page } from "./page.js";
export {
  PacedRenderer,
  type ReadingRate,
  type RendererOptions,
  type RendererState,
} from "./renderer.js";
export { observeScroll, type Pausable, type ScrollOptions } from "./scroll.js";
export type { Amount, PositionSource, ReaderPosition, TokenFlowStream } from "./stream.js";
