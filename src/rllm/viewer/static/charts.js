// A cursor over all charts at once shows the values of one step. A click or Enter opens the step, dragging selects a range.
const SVG = "http://www.w3.org/2000/svg";
const [LEFT, RIGHT, TOP, BOTTOM] = [44, 412, 8, 130];

function pointsOf(line) {
  return line.dataset.points.trim().split(" ").map((point) => {
    const [step, value, x, y] = point.split(",");
    return { step: Number(step), value, x: Number(x), y: Number(y) };
  });
}

function nearest(points, x) {
  return points.reduce((best, point) => (Math.abs(point.x - x) < Math.abs(best.x - x) ? point : best), points[0]);
}

class Chart {
  constructor(svg, others) {
    this.svg = svg;
    this.others = others;
    this.lines = [...svg.querySelectorAll("[data-line]")].map(pointsOf);
    this.values = [...svg.closest("figure").querySelectorAll(".value")];
    this.steps = [...new Set(this.lines.flat().map((point) => point.step))].sort((one, other) => one - other);
    this.cursor = svg.appendChild(document.createElementNS(SVG, "path"));
    this.cursor.setAttribute("class", "cursor");
    this.chosen = null;
    svg.addEventListener("pointermove", (event) => this.point(event));
    svg.addEventListener("pointerleave", () => this.showAll(null));
    svg.addEventListener("blur", () => this.showAll(null));
    svg.addEventListener("keydown", (event) => this.key(event));
    svg.addEventListener("pointerdown", (event) => this.begin(event));
    svg.addEventListener("click", (event) => this.click(event));
  }

  x(event) {
    const box = this.svg.getBoundingClientRect();
    return ((event.clientX - box.left) / box.width) * this.svg.viewBox.baseVal.width;
  }

  stepAt(x) {
    return nearest(this.lines.flat(), x).step;
  }

  point(event) {
    const x = this.x(event);
    this.showAll(this.stepAt(x));
    if (this.from === undefined) return;
    if (!this.box) {
      this.box = this.svg.appendChild(document.createElementNS(SVG, "rect"));
      this.box.setAttribute("class", "select");
    }
    const [low, high] = [Math.min(this.from, x), Math.max(this.from, x)];
    for (const [name, value] of Object.entries({ x: low, width: high - low, y: TOP, height: BOTTOM - TOP })) {
      this.box.setAttribute(name, value);
    }
  }

  begin(event) {
    if (event.button !== 0) return;
    event.preventDefault();
    this.svg.focus({ preventScroll: true });
    this.from = this.x(event);
    this.dragged = false;
    window.addEventListener("pointerup", (end) => this.end(end), { once: true });
  }

  end(event) {
    const [from, to] = [this.from, this.x(event)].sort((one, other) => one - other);
    this.from = undefined;
    this.box?.remove();
    this.box = undefined;
    if (to - from < 12) return;
    this.dragged = true;
    const url = new URL(location.href);
    url.searchParams.set("from", this.stepAt(from));
    url.searchParams.set("to", this.stepAt(to));
    location.assign(url);
  }

  click(event) {
    if (event.target.closest("a") || this.dragged) {
      if (this.dragged) event.preventDefault();
      return;
    }
    this.open(this.stepAt(this.x(event)));
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) {
      const place = this.chosen === null ? (move > 0 ? -1 : this.steps.length) : this.steps.indexOf(this.chosen);
      const next = this.steps[Math.max(0, Math.min(this.steps.length - 1, place + move))];
      this.showAll(next);
      event.preventDefault();
    } else if (event.key === "Enter" && this.chosen !== null) {
      this.open(this.chosen);
    }
  }

  open(step) {
    location.assign(this.svg.dataset.step.replace(/0$/, step));
  }

  showAll(step) {
    for (const chart of this.others) chart.show(step);
  }

  show(step) {
    this.chosen = step;
    let x = null;
    this.lines.forEach((points, place) => {
      const found = points.find((point) => point.step === step);
      if (found) x = found.x;
      const value = this.values[place];
      if (value) value.textContent = step === null ? value.dataset.last : found ? found.value : "–";
    });
    this.cursor.setAttribute("d", x === null ? "" : `M${x} ${TOP}V${BOTTOM}`);
    if (step !== null) this.svg.setAttribute("aria-valuetext", `step ${step}`);
  }
}

export function charts(root) {
  const all = [];
  for (const svg of root.querySelectorAll("svg.plot[data-step]")) all.push(new Chart(svg, all));
}
