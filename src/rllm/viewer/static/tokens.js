// Values of the token under the pointer or the cursor, and a change of the overlay without loading the page again.
const NAMES = ["mask", "version", "sampler", "trainer", "gap", "ratio", "entropy", "advantage", "weight"];
const MASKS = ["prompt or inserted", "sampled, not trained on", "sampled and trained on"];

function element(name, text, className) {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

class Tokens {
  constructor(root, aside) {
    this.root = root;
    this.aside = aside;
    this.at = -1;
    root.addEventListener("pointerover", (event) => this.point(event));
    root.addEventListener("click", (event) => this.point(event));
    root.addEventListener("keydown", (event) => this.key(event));
    root.addEventListener("focus", () => this.at < 0 && this.show(this.first));
  }

  get first() {
    return Number(this.root.dataset.start);
  }

  async load() {
    const answer = await fetch(this.root.dataset.source);
    if (answer.ok) this.data = await answer.json();
    this.root.dataset.ready = "";
    if (this.at >= 0) this.show(this.at);
  }

  // Blocks are in order, so the one that holds a position is found by binary search.
  elementAt(place) {
    const blocks = this.root.children;
    let [low, high] = [0, blocks.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (Number(blocks[middle].dataset.start) <= place) low = middle;
      else high = middle - 1;
    }
    const block = blocks[low];
    return block?.children[place - Number(block.dataset.start)];
  }

  point(event) {
    const token = event.target.closest("i");
    if (!token) return;
    const block = token.parentElement;
    this.show(Number(block.dataset.start) + Array.prototype.indexOf.call(block.children, token));
  }

  key(event) {
    const last = this.data ? this.data.ids.length - 1 : this.at;
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, PageDown: 200, PageUp: -200 };
    let place = this.at + (moves[event.key] ?? 0);
    if (event.key === "Home") place = this.first;
    else if (event.key === "End") place = last;
    else if (event.key === "n" || event.key === "p") place = this.span(event.key === "n");
    else if (!(event.key in moves)) return;
    event.preventDefault();
    this.show(Math.max(this.first, Math.min(last, place)), true);
  }

  // Start of the next answer, or of the previous one.
  span(next) {
    const starts = (this.data?.spans ?? []).map(([start]) => start);
    const found = next ? starts.find((start) => start > this.at) : starts.findLast((start) => start < this.at);
    return found ?? this.at;
  }

  show(place, scroll = false) {
    this.current?.classList.remove("at");
    this.at = place;
    this.current = this.elementAt(place);
    this.current?.classList.add("at");
    if (scroll) this.current?.scrollIntoView({ block: "nearest" });
    if (this.data) this.describe(place);
  }

  describe(place) {
    const { ids, bytes, columns, spans, clip } = this.data;
    const id = ids[place];
    const list = document.createElement("dl");
    const add = (name, value) => list.append(element("dt", name), element("dd", value));
    add("position", place);
    add("id", id);
    add("bytes", bytes[id] ?? "unknown");
    for (const name of NAMES) {
      const value = columns[name]?.[place];
      if (value === null || value === undefined) continue;
      add(name, name === "mask" ? MASKS[value] : String(value));
    }
    const [ratio, advantage] = [columns.ratio?.[place], columns.advantage?.[place]];
    if (clip && ratio != null && advantage != null) {
      const clipped = (advantage > 0 && ratio > clip[1]) || (advantage < 0 && ratio < clip[0]);
      add("clipped", clipped ? `yes, outside ${clip[0]} to ${clip[1]}` : "no");
    }
    const call = spans.find(([start, stop]) => start <= place && place < stop);
    if (call) add("call", call[2]);
    this.aside.replaceChildren(element("p", this.current?.textContent ?? "", "text"), list);
  }
}

export function tokens(root) {
  const found = root.getElementById("tokens");
  if (!found || found.dataset.ready !== undefined) return;
  const view = new Tokens(found, root.querySelector(".inspect"));
  root.querySelectorAll("a[data-overlay]").forEach((link) => {
    link.addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      overlay(link.href, view);
    });
  });
  view.load();
}

// The server chooses the colours; only the classes of the tokens are copied, so that position and cursor stay.
async function overlay(url, view) {
  const answer = await fetch(url);
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const blocks = fresh.getElementById("tokens").children;
  [...view.root.children].forEach((block, number) => {
    const others = blocks[number].children;
    [...block.children].forEach((token, place) => {
      if (token.className !== others[place].className) token.className = others[place].className;
    });
  });
  view.root.dataset.overlay = fresh.getElementById("tokens").dataset.overlay;
  for (const part of [".legend-row", ".overlays"]) {
    const [old, made] = [document.querySelector(part), fresh.querySelector(part)];
    if (part === ".legend-row") old.replaceWith(made);
    else {
      [...old.children].forEach((link, place) => {
        const other = made.children[place];
        link.setAttribute("href", other.getAttribute("href"));
        if (other.hasAttribute("aria-current")) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      });
    }
  }
  history.replaceState(null, "", url);
  view.show(view.at >= 0 ? view.at : view.first);
}
