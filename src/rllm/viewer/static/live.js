// Live updates: the page asks every two seconds whether anything was written, and replaces its content if so.
const EVERY_MS = 2000;

async function pulseOf(source) {
  const answer = await fetch(source, { headers: { accept: "application/json" } });
  return answer.ok ? answer.json() : null;
}

// True while the user selects text, uses a form, or has the focus in content that would be replaced.
function isBusy(main) {
  const active = document.activeElement;
  const inside = main.contains(active) && active !== main && !active.matches("a, svg");
  return inside || !getSelection().isCollapsed || document.querySelector("dialog[open]") || document.querySelector(".cursor[d^=M]");
}

function pathTo(element) {
  return element?.matches?.("a[href]") ? element.getAttribute("href") : null;
}

async function refresh(enhance) {
  const main = document.getElementById("main");
  const answer = await fetch(location.href);
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("main");
  if (!fresh || isBusy(main)) return;
  const focused = pathTo(document.activeElement);
  const opened = [...main.querySelectorAll("details[open] > summary")].map((item) => item.textContent);
  main.replaceChildren(...fresh.childNodes);
  for (const summary of main.querySelectorAll("details > summary")) {
    if (opened.includes(summary.textContent)) summary.parentElement.open = true;
  }
  if (focused) main.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  enhance();
}

export function live(enhance) {
  const source = document.body.dataset.pulse;
  if (!source || document.getElementById("tokens")) return;
  let known = null;
  const ask = async () => {
    try {
      const pulse = document.hidden ? null : await pulseOf(source);
      if (pulse) {
        if (known !== null && pulse.state !== known && !isBusy(document.getElementById("main"))) {
          known = pulse.state;
          await refresh(enhance);
        }
        known ??= pulse.state;
      }
    } catch {
      // The viewer was stopped; the page continues once it is back.
    }
    setTimeout(ask, EVERY_MS);
  };
  ask();
}
