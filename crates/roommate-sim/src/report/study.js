  // Continues figures.js for the study of a trace: a curve for each size of job.

  function studyFigures() {
    const present = (id) => byId(`fig-${id}`)?.querySelector(".plot");
    const points = (id) => runs.map((run) => run[id]);
    for (const id of ["run", "wait"]) {
      if (present(id)) distributions(id, points(id), () => true, "No jobs");
    }
    if (present("util")) {
      chart({
        id: "util", series: points("util").map(({ x, y }) => ({ xs: x, ys: y, end: Infinity })),
        top: () => 1, limits: [], gutter: 48, empty: "No jobs",
        domain: () => ({ low: 0, high: 1, log: false }),
        xTicks: () => [0, 0.25, 0.5, 0.75, 1], xText: (v) => `${Math.round(v * 100)} %`,
        yTicks: (n) => (n >= 5 ? [0, 0.2, 0.4, 0.6, 0.8, 1] : [0, 0.5, 1]),
        yText: (v) => `${Math.round(v * 100)} %`, value: percent,
        at: (x) => `at most ${percent(x)} busy`,
      });
    }
    legends();
  }

  studyFigures();
  themes(() => {});
})();
