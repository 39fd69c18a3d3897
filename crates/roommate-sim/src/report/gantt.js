  // Continues figures.js: all files are one script, put together by report.rs.

  // ---- Gantt ----

  const LEVELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  const decoded = [];

  /** Undoes the column encoding of a run's stays, and gives overlapping stays lanes of their row. */
  function decodeStays(run) {
    const g = run.gantt;
    const n = g.job.length;
    const c = {
      n, rows: run.gpus, first: new Uint32Array(run.gpus + 1), gpu: new Uint32Array(n), job: g.job, sm: g.sm,
      from: new Float64Array(n), to: new Float64Array(n), lane: new Uint8Array(n), lanes: new Uint8Array(n).fill(1),
      joined: new Uint8Array(n), ofJob: g.job_index.map(() => []),
    };
    let i = 0;
    for (let gpu = 0; gpu < run.gpus; gpu++) {
      c.first[gpu] = i;
      let start = 0;
      for (let k = 0; k < g.per_gpu[gpu]; k++, i++) {
        start += g.from[i];
        c.gpu[i] = gpu;
        c.from[i] = start * run.tick_s;
        c.to[i] = (start + g.length[i]) * run.tick_s;
        c.ofJob[g.job[i]].push(i);
      }
      layLanes(c, c.first[gpu], i);
    }
    c.first[run.gpus] = i;
    const nodeStart = new Set(run.nodes.map((node) => node[0]));
    for (let gpu = 1; gpu < run.gpus; gpu++) if (!nodeStart.has(gpu)) joinRows(c, gpu);
    return c;
  }

  /** Greedy lanes within each group of stays that overlap one another. */
  function layLanes(c, from, to) {
    let group = from;
    let ends = [];
    let reach = -Infinity;
    for (let i = from; i <= to; i++) {
      if (i === to || c.from[i] >= reach) {
        for (let k = group; k < i; k++) c.lanes[k] = Math.min(255, ends.length);
        group = i;
        ends = [];
        reach = -Infinity;
        if (i === to) return;
      }
      let lane = ends.findIndex((end) => end <= c.from[i]);
      if (lane < 0) lane = Math.min(254, ends.length);
      ends[lane] = c.to[i];
      c.lane[i] = lane;
      reach = Math.max(reach, c.to[i]);
    }
  }

  /** Marks stays that continue the same job's stay on the GPU above, to be drawn as one block. */
  function joinRows(c, gpu) {
    let above = c.first[gpu - 1];
    for (let i = c.first[gpu]; i < c.first[gpu + 1]; i++) {
      while (above < c.first[gpu] && c.from[above] < c.from[i]) above++;
      for (let k = above; k < c.first[gpu] && c.from[k] === c.from[i]; k++) {
        if (c.job[k] === c.job[i] && c.to[k] === c.to[i] && c.lanes[k] === 1 && c.lanes[i] === 1) c.joined[i] = 1;
      }
    }
  }

  function decodeHeat(run) {
    const g = run.gantt;
    const level = new Map([...LEVELS].map((digit, i) => [digit, i / 63]));
    return { rows: Math.ceil(run.gpus / g.gpus_per_row), cols: g.cols, cells: Float32Array.from(g.cells, (digit) => level.get(digit)), picture: null };
  }

  function decode(i) {
    if (!decoded[i]) decoded[i] = runs[i].gantt.kind === "heat" ? decodeHeat(runs[i]) : decodeStays(runs[i]);
    return decoded[i];
  }

  /** `3`, `0–7`, `0–3, 8`: what a person would write for a sorted list. */
  function ranges(list) {
    const parts = [];
    for (let i = 0; i < list.length; ) {
      let j = i;
      while (j + 1 < list.length && list[j + 1] === list[j] + 1) j++;
      parts.push(j > i ? `${list[i]}–${list[j]}` : `${list[i]}`);
      i = j + 1;
    }
    return parts.length > 12 ? `${parts.slice(0, 12).join(", ")} …` : parts.join(", ");
  }

  function gantt() {
    const holder = document.querySelector(".gantt");
    const [base, over] = holder.querySelectorAll("canvas");
    const tabs = [...document.querySelectorAll(".tabs [role=tab]")];
    let shown = 0;
    let view = null;
    let box = null;
    let theme = null;
    let selected = null;
    let drag = null;

    const isHeat = () => runs[shown].gantt.kind === "heat";
    const rowGpus = () => (isHeat() ? runs[shown].gantt.gpus_per_row : 1);
    const whole = () => ({ t0: 0, t1: runs[shown].end_s || 1, r0: 0, r1: Math.max(1, decode(shown).rows) });
    const px = (t) => box.left + ((t - view.t0) / (view.t1 - view.t0)) * (box.right - box.left);
    const py = (r) => box.top + ((r - view.r0) / (view.r1 - view.r0)) * (box.bottom - box.top);
    const timeAt = (x) => view.t0 + ((x - box.left) / (box.right - box.left)) * (view.t1 - view.t0);
    const rowAt = (y) => view.r0 + ((y - box.top) / (box.bottom - box.top)) * (view.r1 - view.r0);
    const nodeOf = (gpu) => runs[shown].nodes.findIndex(([first, count]) => gpu >= first && gpu < first + count);

    function readTheme() {
      const style = getComputedStyle(root);
      const get = (name) => style.getPropertyValue(`--${name}`).trim();
      theme = { text: get("text"), muted: get("muted"), line: get("line"), grid: get("grid"), band: get("band"), card: get("card"), heat: get("c0"), light: Number(get("bar-l")), bars: new Map() };
    }

    /** Neighbouring indices get distant hues; three lightnesses tell them apart without hue. */
    function barColour(index) {
      const slot = index % 96;
      if (!theme.bars.has(slot)) {
        const hue = (slot * 137.508 + 250) % 360;
        const light = theme.light + ((slot % 3) - 1) * 0.07;
        theme.bars.set(slot, `oklch(${light.toFixed(3)} 0.095 ${hue.toFixed(1)})`);
      }
      return theme.bars.get(slot);
    }

    function size(canvas, width, height) {
      const ratio = devicePixelRatio || 1;
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      const ctx = canvas.getContext("2d");
      ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
      ctx.clearRect(0, 0, width, height);
      ctx.font = '11px system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif';
      ctx.textBaseline = "middle";
      return ctx;
    }

    function layout() {
      const rows = Math.max(1, decode(shown).rows);
      const height = rows <= 40 ? Math.max(40, rows * 15) : clamp(rows * 8, 600, rows > 300 ? 760 : 640);
      holder.style.height = `${height + 30}px`;
      const width = holder.clientWidth;
      box = { left: width < 560 ? 46 : 64, right: width - 10, top: 2, bottom: height + 2, width, height: height + 30 };
    }

    function draw() {
      if (holder.clientWidth < 80) return;
      if (!theme) readTheme();
      layout();
      view ??= whole();
      const ctx = size(base, box.width, box.height);
      drawNodes(ctx);
      ctx.save();
      ctx.beginPath();
      ctx.rect(box.left, box.top, box.right - box.left, box.bottom - box.top);
      ctx.clip();
      if (isHeat()) drawHeat(ctx);
      else drawStays(ctx);
      ctx.restore();
      drawLines(ctx);
      drawOver();
      const all = whole();
      byId("zoom-reset").disabled = view.t0 === all.t0 && view.t1 === all.t1 && view.r0 === all.r0 && view.r1 === all.r1;
      byId("ramp").hidden = !isHeat();
    }

    function drawNodes(ctx) {
      ctx.textAlign = "right";
      const tallest = (box.bottom - box.top) / ((view.r1 - view.r0) * rowGpus()) * Math.max(...runs[shown].nodes.map((n) => n[1]));
      const every = Math.max(1, Math.ceil(14 / tallest));
      runs[shown].nodes.forEach(([first, count], node) => {
        const y0 = Math.max(box.top, py(first / rowGpus()));
        const y1 = Math.min(box.bottom, py((first + count) / rowGpus()));
        if (y1 <= y0) return;
        if (node % 2 === 0) {
          ctx.fillStyle = theme.band;
          ctx.fillRect(box.left, y0, box.right - box.left, y1 - y0);
        }
        const middle = (y0 + y1) / 2;
        if (node % every !== 0) return;
        ctx.fillStyle = theme.muted;
        ctx.fillText(`node ${node}`, box.left - 8, clamp(middle, box.top + 6, box.bottom - 6));
      });
    }

    function drawLines(ctx) {
      ctx.strokeStyle = theme.line;
      ctx.fillStyle = theme.muted;
      ctx.lineWidth = 1;
      ctx.beginPath();
      ctx.moveTo(box.left, box.bottom + 0.5);
      ctx.lineTo(box.right, box.bottom + 0.5);
      for (const t of timeTicks(view.t0, view.t1, Math.floor((box.right - box.left) / 90))) {
        const x = Math.round(px(t)) + 0.5;
        ctx.moveTo(x, box.bottom);
        ctx.lineTo(x, box.bottom + 5);
        ctx.textAlign = box.right - x < 24 ? "right" : "center";
        ctx.fillText(duration(t), ctx.textAlign === "right" ? box.right + 8 : x, box.bottom + 16);
      }
      ctx.stroke();
    }

    /** Where a stay is drawn; a gap is left below a row where there is room for one. */
    function rect(c, i) {
      const height = (box.bottom - box.top) / (view.r1 - view.r0);
      const gap = height >= 5 ? 1 : 0;
      const lane = (height - gap) / c.lanes[i];
      const top = py(c.gpu[i]) + lane * c.lane[i] - (c.joined[i] ? gap : 0);
      const x0 = Math.max(box.left, px(c.from[i]));
      const x1 = Math.min(box.right, px(c.to[i]));
      const split = c.lanes[i] > 1 && lane >= 4 ? 0.5 : 0;
      return { x: x0, y: top, w: Math.max(x1 - x0 - (x1 - x0 > 3 ? 0.75 : 0), 0.75), h: lane + (c.joined[i] ? gap : 0) - split };
    }

    const visible = (c, i) => c.to[i] >= view.t0 && c.from[i] <= view.t1;

    function drawStays(ctx) {
      const c = decode(shown);
      const g = runs[shown].gantt;
      ctx.textAlign = "left";
      const labels = [];
      for (let gpu = Math.max(0, Math.floor(view.r0)); gpu < Math.min(c.rows, Math.ceil(view.r1)); gpu++) {
        for (let i = c.first[gpu]; i < c.first[gpu + 1]; i++) {
          if (!visible(c, i)) continue;
          const r = rect(c, i);
          ctx.fillStyle = barColour(g.job_index[c.job[i]]);
          ctx.fillRect(r.x, r.y, r.w, r.h);
          if (!c.joined[i] && r.w >= 34 && r.h >= 11) labels.push(i, r);
        }
      }
      // After all bars, because a block of several rows is painted row by row.
      ctx.fillStyle = "#10151a";
      for (let k = 0; k < labels.length; k += 2) {
        const r = labels[k + 1];
        const name = data.names[g.job_name[c.job[labels[k]]]];
        const fits = Math.floor((r.w - 8) / 6);
        ctx.fillText(name.length <= fits ? name : `${name.slice(0, fits - 1)}…`, r.x + 4, r.y + Math.min(r.h, 15) / 2 + 0.5, r.w - 6);
      }
    }

    const parse = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

    function drawHeat(ctx) {
      const c = decode(shown);
      if (c.rows === 0) return;
      if (c.theme !== theme) {
        const [from, to] = [parse(theme.band), parse(theme.heat)];
        c.picture = make("canvas", { width: c.cols, height: c.rows });
        const pixels = new ImageData(c.cols, c.rows);
        c.cells.forEach((level, i) => {
          for (let k = 0; k < 3; k++) pixels.data[4 * i + k] = from[k] + (to[k] - from[k]) * level;
          pixels.data[4 * i + 3] = level > 0 ? 255 : 0;
        });
        c.picture.getContext("2d").putImageData(pixels, 0, 0);
        c.theme = theme;
      }
      ctx.imageSmoothingEnabled = false;
      const span = runs[shown].gantt.col_s * c.cols;
      ctx.drawImage(c.picture, px(0), py(0), px(span) - px(0), py(c.rows) - py(0));
    }

    function drawOver() {
      const ctx = size(over, box.width, box.height);
      ctx.save();
      ctx.beginPath();
      ctx.rect(box.left - 1, box.top - 1, box.right - box.left + 2, box.bottom - box.top + 2);
      ctx.clip();
      if (selected !== null) highlight(ctx);
      if (drag?.moved) {
        const band = dragBox();
        ctx.fillStyle = theme.text;
        ctx.globalAlpha = 0.12;
        ctx.fillRect(band.x0, band.y0, band.x1 - band.x0, band.y1 - band.y0);
        ctx.globalAlpha = 0.6;
        ctx.strokeStyle = theme.text;
        ctx.strokeRect(band.x0 + 0.5, band.y0 + 0.5, band.x1 - band.x0 - 1, band.y1 - band.y0 - 1);
      }
      ctx.restore();
    }

    function highlight(ctx) {
      const c = decode(shown);
      ctx.strokeStyle = theme.text;
      ctx.lineWidth = 1.5;
      if (isHeat()) {
        const { row, col } = selected;
        const colS = runs[shown].gantt.col_s;
        const [x, y] = [px(col * colS), py(row)];
        ctx.strokeRect(x - 0.5, y - 0.5, px((col + 1) * colS) - x + 1, py(row + 1) - y + 1);
        return;
      }
      // Fades everything, then lets all stays of the job shine through.
      ctx.fillStyle = theme.card;
      ctx.globalAlpha = 0.5;
      ctx.fillRect(box.left, box.top, box.right - box.left, box.bottom - box.top);
      ctx.globalAlpha = 1;
      const job = c.job[selected];
      for (const i of c.ofJob[job]) {
        if (!visible(c, i)) continue;
        const r = rect(c, i);
        ctx.fillStyle = barColour(runs[shown].gantt.job_index[job]);
        ctx.fillRect(r.x, r.y, Math.max(r.w, 2), Math.max(r.h, 2));
      }
      const r = rect(c, selected);
      ctx.strokeRect(r.x, r.y, Math.max(r.w, 2), Math.max(r.h, 2));
    }

    // -- what is under the pointer --

    function hit(x, y) {
      if (x < box.left || x > box.right || y < box.top || y > box.bottom) return null;
      const c = decode(shown);
      const row = Math.floor(rowAt(y));
      if (row < 0 || row >= c.rows) return null;
      if (isHeat()) return { row, col: clamp(Math.floor(timeAt(x) / runs[shown].gantt.col_s), 0, c.cols - 1) };
      let best = null;
      let nearest = 3;
      for (let i = c.first[row]; i < c.first[row + 1]; i++) {
        if (!visible(c, i)) continue;
        const r = rect(c, i);
        const away = x < r.x ? r.x - x : Math.max(0, x - r.x - r.w);
        const beside = c.lanes[i] > 1 && (y < r.y || y > r.y + r.h + 1) ? 2 : 0;
        // Short stays are hard to point at, so the nearest within a few pixels counts.
        if (away + beside < nearest) {
          nearest = away + beside;
          best = i;
        }
      }
      return best;
    }

    function describe(what) {
      const run = runs[shown];
      const c = decode(shown);
      if (isHeat()) {
        const { gpus_per_row: per, col_s: colS } = run.gantt;
        const first = what.row * per;
        const last = Math.min(run.gpus, first + per) - 1;
        return {
          title: first === last ? `GPU ${first}` : `GPUs ${first}–${last}`,
          lines: [
            nodeText(first, last),
            `${duration(what.col * colS)} – ${duration((what.col + 1) * colS)}`,
            `${Math.round(c.cells[what.row * c.cols + what.col] * 100)} % of the time in use`,
          ],
        };
      }
      const job = c.job[what];
      const at = c.from[what];
      const now = c.ofJob[job].filter((i) => i === what || (c.from[i] <= at && c.to[i] > at));
      const gpus = [...new Set(now.map((i) => c.gpu[i]))].sort((a, b) => a - b);
      const starts = [...new Set(c.ofJob[job].map((i) => c.from[i]))].sort((a, b) => a - b);
      const team = data.names[run.gantt.job_team[job]];
      const lines = [
        `${duration(at)} – ${duration(c.to[what])} (${duration(c.to[what] - at)})`,
        `${gpus.length === 1 ? "GPU" : "GPUs"} ${ranges(gpus)}, ${nodeText(gpus[0], gpus[gpus.length - 1])}`,
      ];
      if (team) lines.unshift(`team ${team}`);
      if (c.sm[what] === 0) lines.push('shares the GPU freely');
      else if (c.sm[what] !== 1000 || c.lanes[what] > 1) lines.push(`${fixed(c.sm[what] / 10, 1)} % of the SMs`);
      if (starts.length > 1) lines.push(`stay ${starts.indexOf(at) + 1} of ${starts.length}`);
      return { title: data.names[run.gantt.job_name[job]], lines };
    }

    function nodeText(first, last) {
      const [a, b] = [nodeOf(first), nodeOf(last)];
      if (a < 0 || b < 0) return "no node";
      return a === b ? `node ${a}` : `nodes ${a}–${b}`;
    }

    function select(what, x, y, spoken) {
      selected = what;
      drawOver();
      if (what === null) return hideTip();
      const { title, lines } = describe(what);
      const bounds = over.getBoundingClientRect();
      showTip([make("strong", {}, title), ...lines.map((line) => make("div", {}, line))], bounds.left + x, bounds.top + y);
      if (spoken) say([title, ...lines].join(", "));
    }

    // -- zoom --

    function zoomTo(next) {
      const all = whole();
      const least = (all.t1 - all.t0) / 1e5;
      const spanT = clamp(next.t1 - next.t0, least, all.t1 - all.t0);
      const spanR = clamp(next.r1 - next.r0, Math.min(1, all.r1), all.r1);
      const t0 = clamp(next.t0, 0, all.t1 - spanT);
      const r0 = clamp(next.r0, 0, all.r1 - spanR);
      view = { t0, t1: t0 + spanT, r0, r1: r0 + spanR };
      if (spanT === all.t1) view.t1 = all.t1;
      selected = null;
      hideTip();
      draw();
    }

    function zoomBy(factor, t = (view.t0 + view.t1) / 2) {
      zoomTo({ ...view, t0: t - (t - view.t0) * factor, t1: t + (view.t1 - t) * factor });
    }

    const reset = () => zoomTo(whole());

    /** The dragged box. Rows are only narrowed by a drag that is clearly meant to. */
    function dragBox() {
      const tall = Math.abs(drag.y - drag.y0) > 40 && !drag.touch;
      const clampX = (x) => clamp(x, box.left, box.right);
      const clampY = (y) => clamp(y, box.top, box.bottom);
      return {
        x0: clampX(Math.min(drag.x, drag.x0)), x1: clampX(Math.max(drag.x, drag.x0)),
        y0: tall ? clampY(Math.min(drag.y, drag.y0)) : box.top, y1: tall ? clampY(Math.max(drag.y, drag.y0)) : box.bottom, tall,
      };
    }

    function endDrag() {
      const done = drag;
      if (!done?.moved) {
        drag = null;
        return;
      }
      const band = dragBox();
      drag = null;
      const next = { ...view, t0: timeAt(band.x0), t1: timeAt(band.x1) };
      if (band.tall) [next.r0, next.r1] = [Math.floor(rowAt(band.y0)), Math.ceil(rowAt(band.y1))];
      zoomTo(next);
    }

    const local = (event) => {
      const bounds = over.getBoundingClientRect();
      return [event.clientX - bounds.left, event.clientY - bounds.top];
    };

    over.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      const [x, y] = local(event);
      drag = { x0: x, y0: y, x, y, moved: false, touch: event.pointerType === "touch" };
      over.setPointerCapture(event.pointerId);
      if (drag.touch) select(hit(x, y), x, y, false);
    });
    over.addEventListener("pointermove", (event) => {
      const [x, y] = local(event);
      if (drag) {
        Object.assign(drag, { x, y, moved: drag.moved || Math.abs(x - drag.x0) > 6 });
        if (drag.moved) {
          selected = null;
          hideTip();
          drawOver();
        }
      } else select(hit(x, y), x, y, false);
    });
    over.addEventListener("pointerup", endDrag);
    over.addEventListener("pointercancel", () => {
      drag = null;
      drawOver();
    });
    over.addEventListener("pointerleave", () => !drag && select(null));
    over.addEventListener("blur", () => select(null));
    over.addEventListener("dblclick", reset);
    over.addEventListener("wheel", (event) => {
      // A page that scrolls must not stop scrolling because a figure came by under the pointer.
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== over) return;
      event.preventDefault();
      const [x] = local(event);
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        const by = ((event.deltaX || event.deltaY) / box.width) * (view.t1 - view.t0);
        zoomTo({ ...view, t0: view.t0 + by, t1: view.t1 + by });
      } else zoomBy(Math.exp(clamp(event.deltaY, -200, 200) * 0.003), timeAt(clamp(x, box.left, box.right)));
    }, { passive: false });

    // -- keys --

    function middleOf(i) {
      const r = rect(decode(shown), i);
      return [r.x + r.w / 2, r.y + r.h / 2];
    }

    function walkStays(key) {
      const c = decode(shown);
      if (c.n === 0) return;
      let next = selected ?? 0;
      if (selected !== null && (key === "ArrowLeft" || key === "ArrowRight")) next += key === "ArrowLeft" ? -1 : 1;
      if (selected !== null && (key === "ArrowUp" || key === "ArrowDown")) {
        const step = key === "ArrowUp" ? -1 : 1;
        let row = c.gpu[selected] + step;
        while (row >= 0 && row < c.rows && c.first[row] === c.first[row + 1]) row += step;
        if (row < 0 || row >= c.rows) return;
        next = c.first[row];
        while (next + 1 < c.first[row + 1] && c.from[next + 1] <= c.from[selected]) next++;
      }
      next = clamp(next, 0, c.n - 1);
      if (!visible(c, next) || c.gpu[next] < view.r0 || c.gpu[next] >= view.r1) reset();
      select(next, ...middleOf(next), true);
    }

    function walkHeat(key) {
      const c = decode(shown);
      if (c.rows === 0) return;
      const at = selected ?? { row: 0, col: 0 };
      const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[key];
      const next = { row: clamp(at.row + down, 0, c.rows - 1), col: clamp(at.col + right, 0, c.cols - 1) };
      select(next, px((next.col + 0.5) * runs[shown].gantt.col_s), py(next.row + 0.5), true);
    }

    over.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key.startsWith("Arrow")) (isHeat() ? walkHeat : walkStays)(event.key);
      else if (event.key === "+" || event.key === "=") zoomBy(0.6);
      else if (event.key === "-") zoomBy(1 / 0.6);
      else if (event.key === "0") reset();
      else if (event.key === "Escape") select(null);
      else return;
      event.preventDefault();
    });
    byId("zoom-in").addEventListener("click", () => zoomBy(0.6));
    byId("zoom-out").addEventListener("click", () => zoomBy(1 / 0.6));
    byId("zoom-reset").addEventListener("click", reset);

    // -- tabs --

    function show(i, focus) {
      shown = i;
      view = null;
      selected = null;
      tabs.forEach((tab, k) => {
        tab.setAttribute("aria-selected", String(k === i));
        tab.tabIndex = k === i ? 0 : -1;
      });
      if (focus) tabs[i].focus();
      byId("gantt-panel").setAttribute("aria-labelledby", tabs[i].id);
      byId("gantt-caption").textContent = runs[i].caption;
      hideTip();
      draw();
    }

    tabs.forEach((tab, i) => {
      tab.addEventListener("click", () => show(i, false));
      tab.addEventListener("keydown", (event) => {
        const next = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: tabs.length - 1 }[event.key];
        if (next === undefined) return;
        event.preventDefault();
        show((next + tabs.length) % tabs.length, true);
      });
    });
    let width = 0;
    new ResizeObserver(() => {
      if (holder.clientWidth !== width) draw();
      width = holder.clientWidth;
    }).observe(holder);
    draw();
    return () => {
      theme = null;
      draw();
    };
  }

  // What is folded away is not missing on paper.
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => (d.open = true)));

  if (runs.length === 0) themes(() => {});
  else {
    lineFigures();
    themes(gantt());
  }
})();
