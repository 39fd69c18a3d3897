"use strict";
// Draws the figures of a page from the data embedded in the page. Text from the data only ever
// reaches the page as text nodes, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const runs = data.runs;
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  function svg(tag, attributes = {}, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  // ---- words and numbers ----

  const grouped = (x) => Math.round(x).toString().replace(/\B(?=(\d{3})+$)/g, ",");
  const fixed = (x, digits) => String(Number(x.toFixed(digits)));

  /** Seconds as a person says them; the same rules as `text::duration` in Rust. */
  function duration(s) {
    const units = [[86400, "d"], [3600, "h"], [60, "m"], [1, "s"]];
    if (s < 0) return `−${duration(-s)}`;
    if (s === 0) return "0 s";
    if (s < 0.0009995) return `${fixed(s * 1e6, 1)} µs`;
    if (s < 0.9995) return `${fixed(s * 1e3, 0)} ms`;
    if (s < 59.95) return `${fixed(s, 1)} s`;
    const top = Math.max(0, units.findIndex(([size]) => s >= size));
    const last = s >= 100 * 86400 ? top : Math.min(3, top + 1);
    let left = Math.round(s / units[last][0]) * units[last][0];
    const parts = [];
    for (const [size, name] of units.slice(0, last + 1)) {
      const whole = Math.floor(left / size);
      left -= whole * size;
      if (whole > 0) parts.push(`${grouped(whole)} ${name}`);
    }
    return parts.join(" ");
  }

  function plural(n, noun) {
    return `${grouped(n)} ${noun}${n === 1 ? "" : "s"}`;
  }

  /** Round numbers between `low` and `high`, about `wanted` of them. */
  function niceTicks(low, high, wanted) {
    const rough = (high - low) / Math.max(1, wanted);
    if (!(rough > 0)) return [low];
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
    return multiples(low, high, step);
  }

  function multiples(low, high, step) {
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
    return ticks;
  }

  /** Like `niceTicks`, but round in minutes, hours and days. */
  function timeTicks(low, high, wanted) {
    const rough = (high - low) / Math.max(1, wanted);
    const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
    const step = steps.find((s) => s >= rough);
    if (rough >= 1 && step) return multiples(low, high, step);
    if (rough < 1) return niceTicks(low, high, wanted);
    return niceTicks(low / 86400, high / 86400, wanted).map((d) => d * 86400);
  }

  /** Round durations on a logarithmic axis; plain 1-2-5 where fewer than three of them fit. */
  function logTimeTicks(low, high, wanted) {
    const inside = (list) => list.filter((t) => t >= low * 0.999 && t <= high * 1.001);
    let ticks = inside([1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 1, 10, 60, 600, 3600, 36000, 86400, 864000, 8640000, 86400000, 864000000]);
    if (ticks.length < 3) {
      const all = [];
      const unit = [86400, 3600, 60].find((u) => low >= u) ?? 1;
      for (let p = Math.floor(Math.log10(low / unit)); p <= Math.log10(high / unit); p++) {
        for (const m of [1, 2, 5]) all.push(m * unit * 10 ** p);
      }
      ticks = inside(all);
    }
    const every = Math.ceil(ticks.length / Math.max(2, wanted));
    return ticks.filter((_, i) => i % every === 0);
  }

  // ---- which runs are drawn, and how each looks: colour, dash and marker, so that no two look alike
  // without colour ----

  /** Runs drawn at the same time; more cannot be told apart. The same number as in report.rs. */
  const DRAWN_MAX = 6;
  const DASHES = ["", "7 3", "2.5 2.5", "10 3 2.5 3", "14 4", "5 2 1.5 2"];
  /** By run; nothing for runs that are not drawn. */
  const looks = runs.map(() => null);
  /** The runs that are drawn; whoever is first makes room for one more. */
  let drawn = [];
  /** The runs that legends list: those that are drawn, or have been. */
  const offered = [];

  function drawRun(run) {
    const taken = new Set(drawn.map((r) => looks[r].slot));
    const slot = DASHES.findIndex((_, i) => !taken.has(i));
    looks[run] = { slot, colour: `var(--c${slot})`, dash: DASHES[slot], marker: slot };
    drawn.push(run);
    if (!offered.includes(run)) offered.push(run);
  }

  function dropRun(run) {
    drawn = drawn.filter((r) => r !== run);
    looks[run] = null;
  }

  (data.drawn ?? runs.map((_, i) => i)).slice(0, DRAWN_MAX).forEach(drawRun);
  // The best are given up last.
  drawn.reverse();

  function marker(kind, x, y, r = 3.4) {
    const at = (points) => points.map(([dx, dy], i) => `${i ? "L" : "M"}${x + dx * r} ${y + dy * r}`).join("");
    switch (kind) {
      case 0: return `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`;
      case 1: return `${at([[-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]])}Z`;
      case 2: return `${at([[0, -1.2], [1.1, 0.8], [-1.1, 0.8]])}Z`;
      case 3: return `${at([[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]])}Z`;
      case 4: return `${at([[0, 1.2], [1.1, -0.8], [-1.1, -0.8]])}Z`;
      case 5: return `${at([[-1, -1], [0, -0.35], [1, -1], [0.35, 0], [1, 1], [0, 0.35], [-1, 1], [-0.35, 0]])}Z`;
      default: return `${at([[-0.4, -1.2], [0.4, -1.2], [0.4, -0.4], [1.2, -0.4], [1.2, 0.4], [0.4, 0.4], [0.4, 1.2], [-0.4, 1.2], [-0.4, 0.4], [-1.2, 0.4], [-1.2, -0.4], [-0.4, -0.4]])}Z`;
    }
  }

  function key(run) {
    const look = looks[run];
    const line = svg("path", { d: "M1 6H27", stroke: look.colour, "stroke-width": 2, "stroke-dasharray": look.dash, fill: "none" });
    const mark = svg("path", { d: marker(look.marker, 14, 6), fill: look.colour });
    return svg("svg", { width: 28, height: 12, viewBox: "0 0 28 12", "aria-hidden": "true" }, line, mark);
  }

  /** Shows everywhere which runs are drawn, and how they look. */
  function markRuns() {
    for (const span of document.querySelectorAll(".key[data-run]")) {
      const run = Number(span.dataset.run);
      span.replaceChildren(...(looks[run] ? [key(run)] : []));
    }
    for (const button of document.querySelectorAll("button.pick")) {
      button.setAttribute("aria-pressed", String(Boolean(looks[button.dataset.run])));
    }
  }

  // ---- tooltip, and the same words for those who listen ----

  const tip = byId("tip");
  let tipScroll = 0;

  function showTip(content, x, y) {
    tip.replaceChildren(...content);
    tip.hidden = false;
    tipScroll = scrollY;
    const box = tip.getBoundingClientRect();
    const gap = 14;
    const left = x + gap + box.width > innerWidth - 8 ? x - gap - box.width : x + gap;
    const top = y + gap + box.height > innerHeight - 8 ? y - gap - box.height : y + gap;
    tip.style.left = `${clamp(left, 8, Math.max(8, innerWidth - 8 - box.width))}px`;
    tip.style.top = `${clamp(top, 8, Math.max(8, innerHeight - 8 - box.height))}px`;
  }

  function hideTip() {
    tip.hidden = true;
  }

  function say(words) {
    byId("said").textContent = words;
  }

  // The event comes a frame late; a tooltip shown since the page came to rest is in its place.
  addEventListener("scroll", () => scrollY !== tipScroll && hideTip(), { passive: true });

  // ---- theme ----

  function themes(repaint) {
    const button = byId("theme");
    const system = matchMedia("(prefers-color-scheme: dark)");
    let chosen = null;
    // Some browsers refuse storage to files; then the choice lasts as long as the page.
    try {
      chosen = localStorage.getItem("roommate-theme");
    } catch {}
    const dark = () => (chosen ?? (system.matches ? "dark" : "light")) === "dark";
    function apply(name) {
      root.dataset.theme = name;
      button.textContent = name === "dark" ? "☀ Light" : "☾ Dark";
      button.setAttribute("aria-label", name === "dark" ? "Use the light theme" : "Use the dark theme");
      repaint();
    }
    const current = () => apply(dark() ? "dark" : "light");
    button.addEventListener("click", () => {
      chosen = dark() ? "light" : "dark";
      try {
        localStorage.setItem("roommate-theme", chosen);
      } catch {}
      current();
    });
    system.addEventListener("change", current);
    // Paper is white.
    addEventListener("beforeprint", () => apply("light"));
    addEventListener("afterprint", current);
    current();
  }

