export { systemClock, systemFrames } from "./clock.js";
export { readContent, StreamError } from "./content.js";
export { createFetch, streamOf } from "./fetch.js";
export { PacedRenderer, } from "./renderer.js";
export { observeScroll } from "./scroll.js";
