// Keyboard shortcuts: j and k move along the links of a page, brackets along steps, a slash searches, u goes up.
function isTyping(element) {
  return element.closest("input, select, textarea, [contenteditable]");
}

function walk(by) {
  const links = [...document.querySelectorAll("[data-nav]")];
  if (!links.length) return;
  const place = links.indexOf(document.activeElement);
  const next = links[Math.max(0, Math.min(links.length - 1, place < 0 ? (by > 0 ? 0 : links.length - 1) : place + by))];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
}

// Arrow keys move between the cells of a grid.
function across(event, cell) {
  const row = cell.closest("tr");
  const place = [...row.querySelectorAll("a")].indexOf(cell);
  const moves = {
    ArrowLeft: () => [...row.querySelectorAll("a")][place - 1],
    ArrowRight: () => [...row.querySelectorAll("a")][place + 1],
    ArrowUp: () => row.previousElementSibling?.querySelectorAll("a")[place],
    ArrowDown: () => row.nextElementSibling?.querySelectorAll("a")[place],
  };
  const target = moves[event.key]?.();
  if (target) {
    target.focus();
    event.preventDefault();
  }
}

const follow = (selector) => document.querySelector(selector)?.click();

const ACTIONS = {
  j: () => walk(1),
  k: () => walk(-1),
  "[": () => follow("[data-prev]"),
  "]": () => follow("[data-next]"),
  u: () => [...document.querySelectorAll(".crumbs a")].at(-1)?.click(),
  "/": () => (document.querySelector("[data-search]") ?? document.querySelector(".find input"))?.focus(),
  "?": () => document.getElementById("keys").showModal(),
};

export function keys() {
  const button = document.querySelector("button.keys");
  button.hidden = false;
  button.addEventListener("click", ACTIONS["?"]);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape" && isTyping(event.target)) event.target.blur();
    if (isTyping(event.target) || document.getElementById("keys").open) return;
    const cell = event.target.closest?.("[data-grid] a");
    if (cell) across(event, cell);
    if (/^[1-8]$/.test(event.key)) document.querySelectorAll("[data-overlay]")[event.key - 1]?.click();
    const action = ACTIONS[event.key];
    if (action) {
      action();
      event.preventDefault();
    }
  });
}
