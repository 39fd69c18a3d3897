  // Continues words.js: all files are one script, put together by report.rs.

  // ---- line figures ----

  const charts = [];

  /** Decodes a step function whose times are ticks. */
  const steps = (run, points) => ({ xs: points.x.map((t) => t * run.tick_s), ys: points.y, end: run.end_s, means: points.means });

  /** Index of the last x that is not after `x`; -1 before the first. */
  function lastAt(xs, x) {
    let low = 0;
    let high = xs.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  function valueAt(series, x) {
    if (series.xs.length === 0 || x > series.end) return null;
    const i = lastAt(series.xs, x);
    return i < 0 ? 0 : series.ys[i];
  }

  /**
   * A figure with one step curve for each run. `spec` has: `id`, `series` (xs, ys, end), `domain()`
   * giving low, high and log, `top()`, `limits` (labelled horizontal lines), `yTicks`, `yText`,
   * `value` (a value in words), `empty` (what to say when there is nothing); `xTicks` and `xText` where
   * the axis is not one of time.
   */
  function chart(spec) {
    const figure = byId(`fig-${spec.id}`);
    const plot = figure.querySelector(".plot");
    const heading = figure.querySelector("h2").textContent;
    const caption = figure.querySelector("figcaption").textContent;
    const some = spec.series.some((s) => s.xs.length > 0);
    let frame = null;
    let cursor = null;
    const note = make("span", { hidden: "" }, " Where a curve changes faster than can be drawn, the line is its mean and the shade its range.");
    figure.querySelector("figcaption").append(note);

    function scales(width, height) {
      const box = { left: spec.gutter, right: width - 12, top: 10, bottom: height - 24 };
      const { low, high, log } = spec.domain();
      const [a, b] = log ? [Math.log(low), Math.log(high)] : [low, high];
      const x = (v) => box.left + (((log ? Math.log(Math.max(v, low)) : v) - a) / (b - a)) * (box.right - box.left);
      const back = (px) => {
        const u = a + ((px - box.left) / (box.right - box.left)) * (b - a);
        return log ? Math.exp(u) : u;
      };
      const top = spec.top();
      const y = (v) => box.bottom - (v / top) * (box.bottom - box.top);
      return { box, low, high, log, x, back, y };
    }

    function axes(f) {
      const layer = svg("g");
      for (const t of spec.yTicks(Math.max(2, Math.floor((f.box.bottom - f.box.top) / 44)))) {
        layer.append(svg("line", { class: t === 0 ? "axis" : "grid", x1: f.box.left, x2: f.box.right, y1: f.y(t), y2: f.y(t) }));
        layer.append(svg("text", { x: f.box.left - 8, y: f.y(t) + 4, "text-anchor": "end" }, spec.yText(t)));
      }
      const wanted = Math.floor((f.box.right - f.box.left) / 84);
      for (const t of (spec.xTicks ?? (f.log ? logTimeTicks : timeTicks))(f.low, f.high, wanted)) {
        layer.append(svg("line", { class: "grid", x1: f.x(t), x2: f.x(t), y1: f.box.top, y2: f.box.bottom }));
        const near = f.box.right - f.x(t) < 24 ? "end" : f.x(t) - f.box.left < 8 ? "start" : "middle";
        layer.append(svg("text", { class: "tick-x", x: near === "end" ? f.box.right + 8 : f.x(t), y: f.box.bottom + 17, "text-anchor": near }, (spec.xText ?? duration)(t)));
      }
      return layer;
    }

    /** Columns of a few pixels with mean and range, for a curve that changes faster than can be seen. */
    function columns(series, f) {
      const width = f.x(series.end) - f.x(0);
      const n = Math.min(series.means?.length ?? 0, Math.floor(width / 4));
      if (n < 1 || series.xs.length < width / 4) return null;
      const bins = Array.from({ length: n }, (_, i) => ({ from: (i * series.end) / n, low: Infinity, high: -Infinity, sum: 0, count: 0 }));
      series.means.forEach((mean, i) => {
        const bin = bins[Math.floor((i * n) / series.means.length)];
        bin.sum += mean;
        bin.count++;
      });
      const reach = (bin, v) => Object.assign(bin, { low: Math.min(bin.low, v), high: Math.max(bin.high, v) });
      let i = 0;
      let before = 0;
      bins.forEach((bin, k) => {
        const to = k + 1 < n ? bins[k + 1].from : Infinity;
        if (series.xs[i] > bin.from || i >= series.xs.length) reach(bin, before);
        for (; i < series.xs.length && series.xs[i] < to; i++) {
          before = series.ys[i];
          // What holds from the very end on lasts for no time within the run.
          if (series.xs[i] < series.end) reach(bin, before);
        }
        // Means and extremes are rounded apart from each other.
        bin.mean = clamp(bin.sum / bin.count, bin.low, bin.high);
      });
      return bins;
    }

    function range(bins, series, f) {
      const edge = (pick) => bins.map((bin, i) => [f.x(bin.from), f.x(bins[i + 1]?.from ?? series.end), f.y(pick(bin))]);
      const upper = edge((bin) => bin.high).map(([a, b, y]) => `L${a.toFixed(1)} ${y.toFixed(1)}H${b.toFixed(1)}`);
      const lower = edge((bin) => bin.low).reverse().map(([a, b, y]) => `L${b.toFixed(1)} ${y.toFixed(1)}H${a.toFixed(1)}`);
      return `M${upper.join("").slice(1)}${lower.join("")}Z`;
    }

    function meanLine(bins, series, f) {
      const middle = (bin, i) => f.x((bin.from + (bins[i + 1]?.from ?? series.end)) / 2);
      return bins.map((bin, i) => `${i ? "L" : "M"}${middle(bin, i).toFixed(1)} ${f.y(bin.mean).toFixed(1)}`).join("");
    }

    const binAt = (bins, x) => bins[Math.max(0, lastAt(bins.map((bin) => bin.from), x))];

    function curve(series, f) {
      let d = `M${f.x(f.low).toFixed(1)} ${f.y(0).toFixed(1)}`;
      for (let i = 0; i < series.xs.length; i++) {
        d += `H${f.x(series.xs[i]).toFixed(1)}V${f.y(series.ys[i] ?? 0).toFixed(1)}`;
      }
      return `${d}H${f.x(Math.min(series.end, f.high)).toFixed(1)}`;
    }

    function marks(series, run, f, bins) {
      let d = "";
      const gap = (f.box.right - f.box.left) / 5;
      // Shifted from run to run, so that the markers of equal curves stand side by side.
      for (let px = f.box.left + gap * (0.3 + looks[run].slot / DRAWN_MAX); px < f.box.right; px += gap) {
        let v = valueAt(series, f.back(px));
        if (v !== null && bins) v = binAt(bins, f.back(px)).mean;
        if (v !== null) d += marker(looks[run].marker, +px.toFixed(1), +f.y(v).toFixed(1));
      }
      return d;
    }

    function draw() {
      const width = plot.clientWidth;
      const height = plot.clientHeight;
      if (width < 80 || height < 80) return;
      const f = scales(width, height);
      const binned = [];
      const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "data-scale": f.log ? "log" : "linear" });
      // A label rather than a <title>, which browsers show as a tooltip of their own above ours.
      picture.setAttribute("aria-label", `${heading}. Arrow keys read out values.`);
      picture.append(svg("desc", {}, caption), axes(f));
      for (const limit of spec.limits) {
        picture.append(svg("line", { class: "limit", x1: f.box.left, x2: f.box.right, y1: f.y(limit), y2: f.y(limit) }));
        picture.append(svg("text", { class: "halo", x: f.box.right - 4, y: f.y(limit) - 4, "text-anchor": "end" }, plural(limit, "GPU")));
      }
      spec.series.forEach((series, run) => {
        if (!looks[run] || series.xs.length === 0) return;
        const look = looks[run];
        const bins = columns(series, f);
        const group = svg("g", { class: "series", "data-run": run });
        if (bins) group.append(svg("path", { class: "range", d: range(bins, series, f), fill: look.colour }));
        const d = bins ? meanLine(bins, series, f) : curve(series, f);
        group.append(svg("path", { class: "curve", d, stroke: look.colour, "stroke-dasharray": look.dash }));
        group.append(svg("path", { d: marks(series, run, f, bins), fill: look.colour }));
        picture.append(group);
        binned[run] = bins;
      });
      note.hidden = !binned.some(Boolean);
      if (!some) picture.append(svg("text", { class: "empty", x: width / 2, y: height / 2 }, spec.empty));
      picture.append(svg("g", { class: "pointer" }));
      const focused = plot.contains(document.activeElement);
      plot.replaceChildren(picture);
      frame = { ...f, picture, binned };
      listen(picture);
      if (focused) picture.focus({ preventScroll: true });
    }

    function point(px, spoken) {
      if (!some) return;
      cursor = clamp(px, frame.box.left, frame.box.right);
      const x = frame.back(cursor);
      const pointer = frame.picture.querySelector(".pointer");
      pointer.replaceChildren(svg("line", { class: "cross", x1: cursor, x2: cursor, y1: frame.box.top, y2: frame.box.bottom }));
      const rows = spec.series
        .map((series, run) => {
          const v = valueAt(series, x);
          const bin = v !== null && frame.binned[run] ? binAt(frame.binned[run], x) : null;
          if (!bin) return { run, v, words: v === null ? "ended" : spec.value(v) };
          const between = bin.low < bin.high ? ` (${fixed(bin.low, 1)}–${fixed(bin.high, 1)})` : "";
          return { run, v: bin.mean, words: `${spec.value(bin.mean)}${between}` };
        })
        .filter((row) => looks[row.run] && spec.series[row.run].xs.length > 0)
        .sort((a, b) => (b.v ?? -1) - (a.v ?? -1));
      const content = [make("strong", {}, spec.at(x))];
      for (const { run, v, words } of rows) {
        const name = make("span", {}, make("span", { class: "key" }, key(run)), runs[run].label);
        content.push(make("div", { class: "pair" }, name, make("span", {}, words)));
        if (v !== null) pointer.append(svg("path", { d: marker(looks[run].marker, cursor, frame.y(v), 4.5), fill: looks[run].colour }));
      }
      const box = frame.picture.getBoundingClientRect();
      showTip(content, box.left + cursor, spoken ? box.top + 20 : lastY);
      if (spoken) say(`${spec.at(x)}: ${rows.map((r) => `${runs[r.run].label} ${r.words}`).join(", ")}`);
    }

    let lastY = 0;
    function leave() {
      frame.picture.querySelector(".pointer").replaceChildren();
      hideTip();
    }

    function listen(picture) {
      const move = (event) => {
        lastY = event.clientY;
        point(event.clientX - picture.getBoundingClientRect().left, false);
      };
      picture.addEventListener("pointermove", move);
      picture.addEventListener("pointerdown", move);
      picture.addEventListener("pointerleave", leave);
      picture.addEventListener("blur", leave);
      picture.addEventListener("keydown", (event) => {
        const { left, right } = frame.box;
        const stride = (right - left) / (event.shiftKey ? 10 : 50);
        const at = cursor ?? (left + right) / 2;
        const next = { ArrowLeft: at - stride, ArrowRight: at + stride, Home: left, End: right }[event.key];
        if (next !== undefined) {
          event.preventDefault();
          point(next, true);
        } else if (event.key === "Escape") leave();
      });
    }

    new ResizeObserver(draw).observe(plot);
    charts.push({ draw, plot, legend: figure.querySelector(".legend") });
    draw();
  }

  /** A button of a legend, which also picks its curve out while it is pointed at. */
  function legendButton(run, plot) {
    const title = `Show or hide this ${data.noun ?? "run"} in all figures`;
    const button = make("button", { type: "button", class: "pick", "data-run": run, title });
    button.append(make("span", { class: "key", "data-run": run }), runs[run].label);
    const pick = (on) => {
      plot.classList.toggle("picked", on && looks[run] !== null);
      for (const g of plot.querySelectorAll(".series")) g.classList.toggle("pick", Number(g.dataset.run) === run);
    };
    for (const event of ["pointerenter", "focus"]) button.addEventListener(event, () => pick(true));
    for (const event of ["pointerleave", "blur", "click"]) button.addEventListener(event, () => pick(false));
    return button;
  }

  /** Legends list the runs on offer; the others are in the table. Buttons stay, so that focus does. */
  function legends() {
    for (const { legend, plot } of charts) {
      const more = legend.querySelector(".more");
      const listed = legend.querySelectorAll("button").length;
      for (const run of offered.slice(listed)) legend.insertBefore(make("li", {}, legendButton(run, plot)), more);
      if (offered.length === runs.length) more?.remove();
      else if (!more) {
        const others = make("a", { href: "#h-league" }, `${runs.length - offered.length} more in the table`);
        legend.append(make("li", { class: "more" }, others));
      } else more.firstChild.textContent = `${runs.length - offered.length} more in the table`;
    }
    markRuns();
  }

  /** Draws a run in all figures, in place of another where there are as many as can be told apart. */
  function toggleRun(run) {
    const name = runs[run].label;
    if (looks[run]) {
      dropRun(run);
      say(`${name} is hidden`);
    } else if (drawn.length < DRAWN_MAX) {
      drawRun(run);
      say(`${name} is drawn`);
    } else {
      const [first] = drawn;
      dropRun(first);
      drawRun(run);
      say(`${name} is drawn instead of ${runs[first].label}`);
    }
    legends();
    for (const { draw } of charts) draw();
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button.pick");
    if (button) toggleRun(Number(button.dataset.run));
  });

  const percent = (v) => `${fixed(v * 100, 1)} %`;

  /** A figure of distributions; `log` tells whether its axis of time is logarithmic. */
  function distributions(id, points, log, empty) {
    const series = points.map(({ x, y }) => ({ xs: x, ys: y, end: Infinity }));
    const times = series.flatMap((s) => s.xs);
    const longest = times.reduce((a, b) => Math.max(a, b), 0) || 1;
    // Seven decades are more than an eye can read; a job that took no time sits at the left edge.
    const shortest = times.reduce((a, b) => (b > 0 ? Math.min(a, b) : a), longest);
    const low = Math.max(shortest, longest / 1e7);
    const logarithmic = { low: low === longest ? low / 10 : low * 0.9, high: longest * 1.05, log: true };
    chart({
      id, series, empty, top: () => 1, limits: [], gutter: 48,
      domain: () => (log() ? logarithmic : { low: 0, high: longest * 1.02, log: false }),
      yTicks: (n) => (n >= 5 ? [0, 0.2, 0.4, 0.6, 0.8, 1] : [0, 0.5, 1]),
      yText: (v) => `${Math.round(v * 100)} %`, value: percent,
      at: (x) => `within ${duration(x)}`,
    });
  }

  function lineFigures() {
    let log = true;
    distributions("cdf", runs.map((run) => run.cdf), () => log, "No job finished");
    const redraw = charts[0].draw;
    for (const name of ["log", "linear"]) {
      byId(`x-${name}`).addEventListener("click", () => {
        log = name === "log";
        byId("x-log").setAttribute("aria-pressed", String(log));
        byId("x-linear").setAttribute("aria-pressed", String(!log));
        redraw();
      });
    }
    const end = Math.max(...runs.map((run) => run.end_s)) || 1;
    const overTime = (id, series, limits, value) => {
      const peaks = series.map((s) => s.ys.reduce((a, b) => Math.max(a, b ?? 0), 0));
      // As high as what is drawn, so that a run that is not drawn does not press the others flat.
      const peak = () => Math.max(0, ...drawn.map((run) => peaks[run]), ...limits);
      const top = () => (peak() || 1) * 1.08;
      chart({
        id, series, limits, top, value,
        gutter: 26 + 7 * Math.max(2, grouped(Math.max(0, ...peaks, ...limits)).length),
        domain: () => ({ low: 0, high: end, log: false }),
        yTicks: (n) => niceTicks(0, top(), n).filter((t) => peak() >= 4 || Number.isInteger(t)),
        yText: (v) => (Number.isInteger(v) ? grouped(v) : fixed(v, 2)),
        at: (x) => `at ${duration(x)}`, empty: "Nothing happened",
      });
    };
    const sizes = [...new Set(runs.map((run) => run.gpus))].filter((n) => n > 0);
    overTime("queue", runs.map((run) => steps(run, run.queue)), [], (v) => `${fixed(v, 1)} job${v === 1 ? "" : "s"}`);
    overTime("busy", runs.map((run) => steps(run, run.busy)), sizes, (v) => `${fixed(v, 1)} GPU${v === 1 ? "" : "s"}`);
    legends();
  }

