// Hides what belongs to a protocol, everywhere on the page.
for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", shown);
    const at = button.dataset.series;
    for (const mark of document.querySelectorAll("svg .s" + at)) mark.style.display = shown ? "" : "none";
    for (const row of document.querySelectorAll("tr.r" + at)) row.classList.toggle("off", !shown);
  });
  // Brings one to the front while it is pointed at.
  const dim = (value) => {
    const own = "s" + button.dataset.series;
    for (const mark of document.querySelectorAll("svg [class^=s]")) {
      mark.style.opacity = value && !mark.classList.contains(own) ? value : "";
    }
  };
  button.addEventListener("pointerenter", () => dim("0.12"));
  button.addEventListener("pointerleave", () => dim(""));
}

// One transaction, step by step.
const player = document.querySelector(".journeys");
if (player && journeys.length > 0) {
  const [select, play, slider, output, group, body] = [
    "select", ".play", "input", "output", ".messages", "tbody",
  ].map((name) => player.querySelector(name));
  const svg = (name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };
  let journey, rows, dots, timer;
  const show = () => {
    const now = (slider.value / 1000) * journey.took_ms;
    output.textContent = `${now.toFixed(1)} of ${journey.took_ms.toFixed(1)} ms, ${journey.txn} from ${journey.region}`;
    journey.steps.forEach((step, at) => {
      const under = step.sent_ms <= now && now < step.at_ms;
      rows[at].className = under ? "now" : step.at_ms <= now ? "done" : "";
      const share = (now - step.sent_ms) / (step.at_ms - step.sent_ms);
      const [ax, ay, bx, by] = step.line;
      dots[at].style.display = under ? "" : "none";
      if (under) {
        dots[at].setAttribute("cx", ax + (bx - ax) * share);
        dots[at].setAttribute("cy", ay + (by - ay) * share);
      }
    });
    const current = body.querySelector(".now");
    if (current && timer) {
      const steps = player.querySelector(".steps");
      steps.scrollTop = current.offsetTop - steps.clientHeight / 3;
    }
  };
  const pause = () => {
    cancelAnimationFrame(timer);
    timer = undefined;
    play.textContent = "Play";
  };
  const choose = () => {
    pause();
    journey = journeys[select.value];
    const cell = (text, kind) => {
      const element = document.createElement("td");
      element.textContent = text;
      if (kind) element.className = kind;
      return element;
    };
    rows = journey.steps.map((step) => {
      const row = document.createElement("tr");
      row.append(
        cell(step.sent_ms.toFixed(1), "n"), cell(step.at_ms.toFixed(1), "n"),
        cell(step.own ? step.kind : `${step.kind} (shared)`), cell(step.from), cell(step.to),
      );
      return row;
    });
    body.replaceChildren(...rows);
    dots = journey.steps.map((step) =>
      svg("circle", { r: step.own ? 7 : 4, class: step.own ? "message" : "other" }));
    group.replaceChildren(...dots);
    slider.value = 0;
    show();
  };
  play.addEventListener("click", () => {
    if (timer) return pause();
    play.textContent = "Pause";
    if (slider.value >= 1000) slider.value = 0;
    // Twelve times slower than it was.
    const began = performance.now() - (slider.value / 1000) * journey.took_ms * 12;
    const tick = (at) => {
      slider.value = Math.min(1000, ((at - began) / 12 / journey.took_ms) * 1000);
      show();
      if (slider.value >= 1000) return pause();
      timer = requestAnimationFrame(tick);
    };
    timer = requestAnimationFrame(tick);
  });
  slider.addEventListener("input", () => { pause(); show(); });
  select.addEventListener("change", choose);
  choose();
}
