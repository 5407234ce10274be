/**
 * Small helpers around the DOM. Values reach the page as text only: tenant and model names come from
 * clients, and the content security policy refuses markup made from strings.
 */

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** A copy of a template: its root, and its elements by their `data-field`. */
export function instantiate(templateId) {
  const root = byId(templateId).content.firstElementChild.cloneNode(true);
  const fields = {};
  for (const element of root.querySelectorAll("[data-field]")) fields[element.dataset.field] = element;
  return { root, fields };
}

/** Writes only what changed, so that a selection survives and nothing flickers. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Text that may be cut by the layout, with all of it as the tooltip. */
export function setName(element, text, full = text) {
  setText(element, text);
  if (element.title !== full) element.title = full;
}

/** A badge says its state in words; `kind` picks the colour and shape beside them. */
export function setBadge(element, text, kind) {
  setText(element, text);
  element.dataset.kind = kind;
}

/** Fills a bar to `fraction`, clamped to 0..1. */
export function setBar(element, fraction) {
  const percent = 100 * Math.min(1, Math.max(0, fraction));
  element.firstElementChild.style.width = `${percent.toFixed(1)}%`;
}

/**
 * Keeps the children of `parent` equal to a list of items with an `id`: one view for each, made by
 * `create` and kept as long as its item is there. Returns the function that shows a new list.
 */
export function keyedList(parent, create) {
  const views = new Map();
  return (items, update) => {
    dropMissing(views, items);
    let next = parent.firstElementChild;
    for (const item of items) {
      if (!views.has(item.id)) views.set(item.id, create());
      const view = views.get(item.id);
      if (view.root === next) next = next.nextElementSibling;
      else parent.insertBefore(view.root, next);
      update(view, item);
    }
  };
}

function dropMissing(views, items) {
  const present = new Set(items.map((item) => item.id));
  for (const [id, view] of views) {
    if (present.has(id)) continue;
    view.root.remove();
    views.delete(id);
  }
}
