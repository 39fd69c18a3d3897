//! The HTML report: one page that compares runs, readable without a network for as long as there
//! are browsers.
//!
//! What lives here: the view of a run that the page needs, the metrics table, the captions, and
//! the data embedded for the figures. The figures themselves are drawn by the scripts in `report/`.
//! What does not: reading journals and computing metrics. The same runs give the same page, byte
//! for byte.

mod condense;
mod services;
mod study;
mod text;
pub mod view;

pub use study::study;

use std::collections::BTreeMap;
use std::fmt::Write as _;

use roommate_core::journal::metrics::Better;
use serde::{Deserialize, Serialize, Serializer};

use condense::{clean_steps, distribution, heat, mean_over_time, means, thin_steps};
use text::{count, duration, html, script_safe};

const STYLE: &str = include_str!("report/style.css");
const SCRIPT: &str = concat!(
    include_str!("report/words.js"),
    include_str!("report/figures.js"),
    include_str!("report/gantt.js")
);

/// Points of one step function at most: more than a wide screen has pixels.
const STEP_POINTS_MAX: usize = 2_000;
/// Points of one distribution at most: steps of 0.2 %.
const CDF_POINTS_MAX: usize = 500;
/// Spans of a run over which a lively step function is averaged: some two pixels each.
const MEAN_SPANS: usize = 400;
/// Points of each kind of figure over all runs, so that many runs still make a small page.
const POINTS_BUDGET: usize = 32_000;
/// Bytes of the page for all Gantt charts. With the points above the page stays below 5 MB.
const GANTT_BUDGET_BYTES: usize = 3_200_000;
/// Stays drawn one by one at most; beyond, a browser redraws too slowly while zooming.
const EXACT_STAYS_MAX: usize = 50_000;
/// Bytes that one stay and one job take in the embedded data, measured and rounded up.
const STAY_BYTES: usize = 26;
const JOB_BYTES: usize = 18;
/// Cells of one heatmap at most.
const HEAT_CELLS_MAX: usize = 205_000;

/// Everything the page shows of one run.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub struct RunView {
    /// The policy's name in the registry.
    pub policy: String,
    /// What the page calls this run; unique among the runs of a page.
    pub label: String,
    /// File name of the journal.
    pub source: String,
    /// The cluster as the user wrote it, such as `8x8:v100`.
    pub cluster: String,
    /// Seed of the run.
    pub seed: u64,
    /// Number of GPUs in the cluster.
    pub gpus: u32,
    /// First GPU and number of GPUs of each node.
    pub nodes: Vec<(u32, u32)>,
    /// When the run ended, in seconds since it began.
    pub end_s: f64,
    /// The same names in the same order for all runs of a page.
    pub metrics: Vec<MetricRow>,
    /// One for each interval of a job on a GPU.
    pub stays: Vec<Stay>,
    /// Names by job index.
    pub job_names: Vec<String>,
    /// Teams by job index.
    pub job_teams: Vec<String>,
    /// Job completion times of the finished jobs, in any order.
    pub jcts_s: Vec<f64>,
    /// Time in seconds and the number of waiting jobs after it.
    pub queue: Vec<(f64, u32)>,
    /// Time in seconds and the GPUs in use after it; a fraction where GPUs are shared.
    pub busy: Vec<(f64, f64)>,
    /// The services that had requests.
    #[serde(default)]
    pub services: Vec<ServiceView>,
}

/// What a run made of the requests of one service.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub struct ServiceView {
    /// Its name.
    pub name: String,
    /// Its objective for the 99th percentile.
    pub slo_ms: Option<f64>,
    /// Share of requests later than that.
    pub late: f64,
    /// Share of windows over it.
    pub over: f64,
    /// Median latency.
    pub p50_ms: f64,
    /// 99th percentile, mean of windows.
    pub p99_ms: f64,
    /// The same of the worst window.
    pub worst_ms: f64,
    /// Requests a second in time.
    pub goodput_rps: f64,
    /// Its accounts, in order.
    pub stretches: Vec<Stretch>,
}

/// An account of a service.
#[derive(Serialize, Deserialize, Clone, Copy, Debug)]
pub struct Stretch {
    /// From when, in seconds since the run began.
    pub from_s: f64,
    /// Until when.
    pub to_s: f64,
    /// 99th percentile, mean of windows.
    pub p99_ms: f64,
    /// The same of the worst window.
    pub worst_ms: f64,
    /// Share of windows over the objective.
    pub over: f64,
}

/// One metric of one run.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub struct MetricRow {
    /// What is measured, such as `mean JCT`.
    pub name: String,
    /// `s`, `ms`, `us` and `h` are shown as durations, `%` as it is, `share` (0 to 1) as a
    /// percentage, `x` as a factor; any other unit is named beside the metric.
    pub unit: String,
    /// Absent where the run has nothing to measure.
    pub value: Option<f64>,
    /// Which values win.
    pub better: Better,
}

/// An interval of one job on one GPU.
#[derive(Serialize, Deserialize, Clone, Copy, Debug)]
pub struct Stay {
    /// Index of the job.
    pub job: u32,
    /// Index of the GPU in the cluster.
    pub gpu: u32,
    /// When the job came, in seconds since the run began.
    pub from_s: f64,
    /// When it left.
    pub to_s: f64,
    /// Its share of the GPU's streaming multiprocessors.
    pub sm_permille: u16,
}

/// A table of words above the figures of single runs: what many runs came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Card {
    /// Its heading.
    pub heading: String,
    /// How to read it.
    pub note: String,
    /// Its cells; the first row and the first column are names.
    pub rows: Vec<Vec<String>>,
}

/// The whole page.
pub fn render(title: &str, runs: &[RunView]) -> String {
    render_with(title, &[], runs)
}

/// The whole page, with tables of words first.
pub fn render_with(title: &str, cards: &[Card], runs: &[RunView]) -> String {
    let data = PageData::new(runs);
    let mut body = String::with_capacity(32_768);
    cards.iter().enumerate().for_each(|(i, card)| push_card(&mut body, i, card));
    if runs.is_empty() {
        body.push_str("<section class=\"card\"><p>No runs to show.</p></section>\n");
    } else {
        push_metrics(&mut body, runs);
        services::push(&mut body, runs);
        push_charts(&mut body, runs);
        push_gantt(&mut body, &data);
        push_sources(&mut body, runs);
    }
    let frame =
        Frame { title, subtitle: &subtitle(runs), script: SCRIPT, maker: "roommate report" };
    frame.around(&body, &data)
}

/// What every page has: its head, its theme, its data and its scripts.
struct Frame<'a> {
    title: &'a str,
    subtitle: &'a str,
    script: &'a str,
    /// The command that made it.
    maker: &'a str,
}

impl Frame<'_> {
    fn around(&self, body: &str, data: &impl Serialize) -> String {
        let json = serde_json::to_string(data).expect("strings and numbers always serialise");
        let size = json.len() + STYLE.len() + self.script.len() + body.len() + 4_096;
        let mut page = String::with_capacity(size);
        let shown = html(self.title);
        // The nonce keeps inline event handlers and foreign scripts from running even if some text
        // slipped through unescaped; everything else, the network above all, is forbidden.
        let _ = write!(
            page,
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; \
             style-src 'nonce-report'; script-src 'nonce-report'; base-uri 'none'; form-action 'none'\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n\
             <meta name=\"generator\" content=\"roommate\">\n\
             <title>{shown}</title>\n<style nonce=\"report\">\n{STYLE}</style>\n</head>\n<body>\n\
             <header class=\"top\">\n<div>\n<h1>{shown}</h1>\n<p class=\"muted\">{}</p>\n</div>\n\
             <button type=\"button\" id=\"theme\" class=\"quiet\">Theme</button>\n</header>\n<main>\n\
             <noscript><p class=\"card\">The figures need JavaScript; the tables do not.</p>\
             </noscript>\n{body}</main>\n\
             <footer class=\"muted\">Made by <code>{}</code>.</footer>\n\
             <div id=\"tip\" hidden></div>\n\
             <div id=\"said\" class=\"unseen\" aria-live=\"polite\"></div>\n\
             <script type=\"application/json\" id=\"data\">",
            html(self.subtitle),
            self.maker
        );
        page.push_str(&script_safe(&json));
        page.push_str("</script>\n<script nonce=\"report\">\n");
        page.push_str(self.script);
        page.push_str("</script>\n</body>\n</html>\n");
        page
    }
}

/// What all runs have in common, or that they do not.
fn subtitle(runs: &[RunView]) -> String {
    let Some(first) = runs.first() else { return "0 runs".to_owned() };
    let mut parts = vec![count(runs.len(), "run")];
    if runs.iter().all(|r| r.cluster == first.cluster) {
        parts.push(format!("cluster {} ({})", first.cluster, count(first.gpus as usize, "GPU")));
    } else {
        parts.push("different clusters: compare with care".to_owned());
    }
    if runs.iter().all(|r| r.seed == first.seed) {
        parts.push(format!("seed {}", first.seed));
    } else {
        parts.push("different seeds".to_owned());
    }
    parts.join(" · ")
}

// ---- metrics table ----

/// Which of a row's values to mark: the best ones, unless there is nothing to choose between.
fn best(values: &[Option<f64>], better: Better) -> Vec<bool> {
    let known = || values.iter().flatten().copied();
    let low = known().fold(f64::INFINITY, f64::min);
    let high = known().fold(f64::NEG_INFINITY, f64::max);
    let target = match better {
        Better::Lower => low,
        Better::Higher => high,
        Better::Neither => return vec![false; values.len()],
    };
    values.iter().map(|v| low < high && *v == Some(target)).collect()
}

/// Seconds in a unit of time; none for other units.
fn seconds_in(unit: &str) -> Option<f64> {
    match unit {
        "us" | "µs" => Some(1e-6),
        "ms" => Some(1e-3),
        "s" => Some(1.0),
        "h" => Some(3_600.0),
        _ => None,
    }
}

/// A value as shown, with up to two steps of `extra` digits, and in full for the tooltip.
fn metric_text(value: f64, unit: &str, extra: usize) -> (String, String) {
    let full = format!("{} {unit}", text::exact(value)).trim_end().to_owned();
    if let Some(scale) = seconds_in(unit) {
        return (text::duration_in(value * scale, 2 + extra), full);
    }
    let plain = match extra {
        0 => text::number(value),
        1 => text::exact((value * 1e4).round() / 1e4),
        _ => text::exact(value),
    };
    let decimals = 1 + 2 * extra;
    match unit {
        "%" => (format!("{value:.decimals$} %"), full),
        "share" => (format!("{:.decimals$} %", value * 100.0), text::exact(value)),
        "x" | "×" => (format!("{plain} ×"), full),
        _ => (plain, full),
    }
}

/// The extra digits without which a best value would look the same as one that is not best: a
/// star nobody could explain.
fn extra_digits(values: &[Option<f64>], marks: &[bool], unit: &str) -> usize {
    let shown = |wanted: bool, extra: usize| {
        let pairs = values.iter().zip(marks).filter(move |&(_, &mark)| mark == wanted);
        pairs.filter_map(move |(value, _)| value.map(|v| metric_text(v, unit, extra).0))
    };
    let clear = |extra: &usize| {
        shown(true, *extra).next().is_none_or(|best| shown(false, *extra).all(|v| v != best))
    };
    (0..2).find(clear).unwrap_or(2)
}

fn push_card(page: &mut String, number: usize, card: &Card) {
    let _ = write!(
        page,
        "<section class=\"card\" aria-labelledby=\"h-card{number}\">\n<h2 id=\"h-card{number}\">{}</h2>\n\
         <div class=\"scroll\" role=\"region\" aria-labelledby=\"h-card{number}\" tabindex=\"0\">\n<table>\n",
        html(&card.heading)
    );
    for (i, row) in card.rows.iter().enumerate() {
        page.push_str("<tr>");
        for (c, cell) in row.iter().enumerate() {
            let (open, close) = match (i, c) {
                (0, _) => ("<th scope=\"col\">", "</th>"),
                (_, 0) => ("<th scope=\"row\">", "</th>"),
                _ => ("<td>", "</td>"),
            };
            let _ = write!(page, "{open}{}{close}", html(cell));
        }
        page.push_str("</tr>\n");
    }
    let note = html(&card.note);
    let _ = write!(page, "</table>\n</div>\n<p class=\"muted\">{note}</p>\n</section>\n");
}

fn push_metrics(page: &mut String, runs: &[RunView]) {
    page.push_str(
        "<section class=\"card\" aria-labelledby=\"h-metrics\">\n<h2 id=\"h-metrics\">Metrics</h2>\n",
    );
    page.push_str(
        "<div class=\"scroll\" role=\"region\" aria-labelledby=\"h-metrics\" tabindex=\"0\">\n\
         <table id=\"metrics\">\n<thead><tr><th scope=\"col\">Metric</th>",
    );
    for (i, run) in runs.iter().enumerate() {
        let _ = write!(
            page,
            "<th scope=\"col\"><span class=\"key\" data-run=\"{i}\"></span>{}</th>",
            html(&run.label)
        );
    }
    page.push_str("</tr></thead>\n<tbody>\n");
    for (row, metric) in runs[0].metrics.iter().enumerate() {
        push_metric_row(page, runs, row, metric);
    }
    page.push_str("</tbody>\n</table>\n</div>\n");
    if runs.len() > 1 {
        page.push_str(
            "<p class=\"muted\">★ marks the best value of a row; ↓ and ↑ tell which direction is \
             better. Point at a value for all its digits.</p>\n",
        );
    }
    page.push_str("</section>\n");
}

fn push_metric_row(page: &mut String, runs: &[RunView], row: usize, metric: &MetricRow) {
    let values: Vec<Option<f64>> = runs
        .iter()
        .map(|r| r.metrics.get(row).and_then(|m| m.value).filter(|v| v.is_finite()))
        .collect();
    // What happened in no run is not worth a row.
    if values.iter().all(|v| v.is_none_or(|v| v == 0.0)) {
        return;
    }
    let marks = best(&values, metric.better);
    let (arrow, words) = match metric.better {
        Better::Lower => ("↓", "lower is better"),
        Better::Higher => ("↑", "higher is better"),
        Better::Neither => ("", ""),
    };
    let _ = write!(page, "<tr><th scope=\"row\">{}", html(&metric.name));
    let plain = matches!(metric.unit.as_str(), "" | "%" | "share" | "x" | "×");
    if !plain && seconds_in(&metric.unit).is_none() {
        let _ = write!(page, " <small class=\"muted\">{}</small>", html(&metric.unit));
    }
    if !arrow.is_empty() {
        let _ = write!(
            page,
            "&nbsp;<span class=\"muted\" aria-hidden=\"true\" title=\"{words}\">{arrow}</span>\
             <span class=\"unseen\">, {words}</span>"
        );
    }
    page.push_str("</th>");
    let extra = extra_digits(&values, &marks, &metric.unit);
    for (value, mark) in values.iter().zip(marks) {
        let Some(value) = value else {
            page.push_str("<td class=\"muted\"><span title=\"not measured\">–</span></td>");
            continue;
        };
        let (shown, full) = metric_text(*value, &metric.unit, extra);
        let (class, star) = if mark {
            (
                " class=\"best\"",
                "<span aria-hidden=\"true\">★ </span><span class=\"unseen\">best: </span>",
            )
        } else {
            ("", "")
        };
        let _ = write!(
            page,
            "<td{class}>{star}<data value=\"{value}\" title=\"{}\">{}</data></td>",
            html(&full),
            html(&shown)
        );
    }
    page.push_str("</tr>\n");
}

// ---- figures ----

fn push_charts(page: &mut String, runs: &[RunView]) {
    page.push_str("<div class=\"charts\">\n");
    let toggle = "<div class=\"switch\" role=\"group\" aria-label=\"Scale of the time axis\">\
         <button type=\"button\" id=\"x-log\" aria-pressed=\"true\">log</button>\
         <button type=\"button\" id=\"x-linear\" aria-pressed=\"false\">linear</button></div>";
    for (id, heading, extra, caption) in [
        ("cdf", "Job completion time", toggle, cdf_caption(runs)),
        ("queue", "Waiting jobs", "", queue_caption(runs)),
        ("busy", "GPUs in use", "", busy_caption(runs)),
    ] {
        let _ = write!(
            page,
            "<figure class=\"card\" id=\"fig-{id}\" aria-labelledby=\"h-{id}\">\n\
             <div class=\"bar\"><h2 id=\"h-{id}\">{heading}</h2>{extra}</div>\n\
             <div class=\"plot\"></div>\n<ul class=\"legend\"></ul>\n\
             <figcaption class=\"muted\">{}</figcaption>\n</figure>\n",
            html(&caption)
        );
    }
    page.push_str("</div>\n");
}

/// A sentence that names the extremes among runs, so that the figure can be read without eyes.
fn extremes(
    values: &[(&str, f64)],
    low: &str,
    high: &str,
    show: impl Fn(f64) -> String,
) -> Option<String> {
    let least = values.iter().min_by(|a, b| a.1.total_cmp(&b.1))?;
    let most = values.iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
    Some(if least.1 == most.1 {
        let all = if values.len() == 1 { least.0 } else { "every run" };
        format!("{} in {all}", show(least.1))
    } else {
        format!("{low} in {} ({}), {high} in {} ({})", least.0, show(least.1), most.0, show(most.1))
    })
}

fn cdf_caption(runs: &[RunView]) -> String {
    let medians: Vec<(&str, f64)> = runs
        .iter()
        .filter_map(|run| {
            let sorted = sorted_jcts(run);
            sorted.get(sorted.len().saturating_sub(1) / 2).map(|&m| (run.label.as_str(), m))
        })
        .collect();
    let about = "Share of the finished jobs that completed within a time of their submission.";
    match extremes(&medians, "shortest", "longest", duration) {
        Some(found) => format!("{about} Median: {found}."),
        None => format!("{about} No job finished."),
    }
}

fn queue_caption(runs: &[RunView]) -> String {
    let peaks: Vec<(&str, f64)> = runs
        .iter()
        .map(|r| (r.label.as_str(), f64::from(r.queue.iter().map(|p| p.1).max().unwrap_or(0))))
        .collect();
    let found = extremes(&peaks, "lowest", "highest", text::number).unwrap_or_default();
    format!("Jobs that wait for GPUs over time. Peak: {found}.")
}

fn busy_caption(runs: &[RunView]) -> String {
    let means: Vec<(&str, f64)> = runs
        .iter()
        .map(|r| {
            let mean = mean_over_time(&clean_steps(r.busy.iter().copied()), end_of(r));
            (r.label.as_str(), mean)
        })
        .collect();
    let found = extremes(&means, "fewest", "most", text::number).unwrap_or_default();
    format!("GPUs with a tenant over time; the dashed line is the cluster. Mean: {found}.")
}

fn push_gantt(page: &mut String, data: &PageData) {
    page.push_str(
        "<figure class=\"card\" id=\"fig-gantt\" aria-labelledby=\"h-gantt\">\n<div class=\"bar\">\
         <h2 id=\"h-gantt\">Who ran where</h2>\n<div class=\"tools\">\
         <button type=\"button\" id=\"zoom-out\" aria-label=\"Zoom out\">−</button>\
         <button type=\"button\" id=\"zoom-in\" aria-label=\"Zoom in\">+</button>\
         <button type=\"button\" id=\"zoom-reset\" disabled>Reset zoom</button></div></div>\n\
         <div class=\"tabs\" role=\"tablist\" aria-label=\"Run\">\n",
    );
    for (i, run) in data.runs.iter().enumerate() {
        let _ = writeln!(
            page,
            "<button type=\"button\" role=\"tab\" id=\"tab-{i}\" aria-controls=\"gantt-panel\" \
             aria-selected=\"{}\" tabindex=\"{}\"><span class=\"key\" data-run=\"{i}\"></span>{}</button>",
            i == 0,
            if i == 0 { 0 } else { -1 },
            html(&run.label)
        );
    }
    let _ = write!(
        page,
        "</div>\n<div id=\"gantt-panel\" role=\"tabpanel\" aria-labelledby=\"tab-0\">\n\
         <div class=\"gantt\"><canvas class=\"base\"></canvas>\
         <canvas class=\"over\" tabindex=\"0\" role=\"img\" aria-labelledby=\"gantt-caption\" \
         aria-describedby=\"gantt-help\"></canvas></div>\n</div>\n\
         <div id=\"ramp\" class=\"muted\" hidden>idle <span></span> in use</div>\n\
         <figcaption class=\"muted\"><span id=\"gantt-caption\">{}</span> <span id=\"gantt-help\">\
         Drag to zoom; Ctrl + wheel zooms too, and so does the wheel alone after a click. \
         Keys: arrows walk from job to job, + − 0 zoom.</span></figcaption>\n</figure>\n",
        html(&data.runs[0].caption)
    );
}

fn push_sources(page: &mut String, runs: &[RunView]) {
    page.push_str(
        "<section class=\"card\" aria-labelledby=\"h-runs\">\n<h2 id=\"h-runs\">Runs</h2>\n\
         <div class=\"scroll\" role=\"region\" aria-labelledby=\"h-runs\" tabindex=\"0\">\n\
         <table id=\"runs\" class=\"plain\"><thead><tr><th scope=\"col\">Run</th>\
         <th scope=\"col\">Policy</th><th scope=\"col\">Cluster</th><th scope=\"col\">Seed</th>\
         <th scope=\"col\">Length</th><th scope=\"col\">Finished jobs</th>\
         <th scope=\"col\">Journal</th></tr></thead>\n<tbody>\n",
    );
    for run in runs {
        let _ = writeln!(
            page,
            "<tr><th scope=\"row\">{}</th><td>{}</td><td>{}</td><td>{}</td>\
             <td title=\"{} s\">{}</td><td>{} of {}</td><td>{}</td></tr>",
            html(&run.label),
            html(&run.policy),
            html(&run.cluster),
            run.seed,
            text::exact(end_of(run)),
            duration(end_of(run)),
            text::number(run.jcts_s.len() as f64),
            text::number(run.job_names.len() as f64),
            html(&run.source)
        );
    }
    page.push_str("</tbody></table>\n</div>\n</section>\n");
}

// ---- embedded data ----

/// What the script reads. Times of a run are whole numbers of its `tick_s`.
#[derive(Serialize)]
struct PageData {
    names: Vec<String>,
    runs: Vec<RunData>,
}

#[derive(Serialize)]
struct RunData {
    label: String,
    gpus: u32,
    nodes: Vec<(u32, u32)>,
    end_s: Number,
    tick_s: Number,
    cdf: Points,
    queue: Steps,
    busy: Steps,
    caption: String,
    gantt: Gantt,
}

/// A polyline as two columns, which JSON writes shorter than pairs.
#[derive(Serialize)]
struct Points {
    x: Vec<Number>,
    y: Vec<Number>,
}

/// A step function, and its means over equal spans of the run for where it changes faster than can
/// be drawn; there are none where it never does.
#[derive(Serialize)]
struct Steps {
    x: Vec<Number>,
    y: Vec<Number>,
    means: Vec<Number>,
}

#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum Gantt {
    /// Stays in columns, sorted by GPU and time. `per_gpu` counts those of each GPU; `from` counts
    /// from the start of the one before on the same GPU; `job` points into the other columns.
    Stays {
        per_gpu: Vec<u32>,
        job: Vec<u32>,
        from: Vec<u64>,
        length: Vec<u64>,
        sm: Vec<u16>,
        job_index: Vec<u32>,
        job_name: Vec<u32>,
        job_team: Vec<u32>,
    },
    Heat {
        gpus_per_row: u32,
        col_s: Number,
        cols: usize,
        cells: String,
    },
}

/// A float that is written as an integer where it is one, and as null where it is none.
#[derive(Clone, Copy)]
struct Number(f64);

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if !self.0.is_finite() {
            serializer.serialize_none()
        } else if self.0.fract() == 0.0 && self.0.abs() < 1e15 {
            serializer.serialize_i64(self.0 as i64)
        } else {
            serializer.serialize_f64(self.0)
        }
    }
}

/// Each string once, in order of first use; jobs of several runs mostly share their names.
#[derive(Default)]
struct Names {
    ids: BTreeMap<String, u32>,
    list: Vec<String>,
}

impl Names {
    fn id(&mut self, name: &str) -> u32 {
        let name = text::clip(name);
        if let Some(&id) = self.ids.get(&name) {
            return id;
        }
        let id = self.list.len() as u32;
        self.list.push(name.clone());
        self.ids.insert(name, id);
        id
    }

    /// Bytes that a name would add to the page.
    fn cost(&self, name: &str) -> usize {
        let name = text::clip(name);
        if self.ids.contains_key(&name) {
            return 0;
        }
        serde_json::to_string(&name).map_or(0, |json| script_safe(&json).len() + 1)
    }
}

impl PageData {
    fn new(runs: &[RunView]) -> Self {
        let mut names = Names::default();
        let mut gantts: Vec<Option<(Gantt, String)>> = runs.iter().map(|_| None).collect();
        // The smallest first: what they leave of their share goes to the larger ones.
        let mut order: Vec<usize> = (0..runs.len()).collect();
        order.sort_by_key(|&i| runs[i].stays.len());
        let mut left = GANTT_BUDGET_BYTES;
        for (done, &i) in order.iter().enumerate() {
            let share = left / (runs.len() - done);
            let (gantt, caption, used) = gantt(&runs[i], &mut names, share);
            left = left.saturating_sub(used);
            gantts[i] = Some((gantt, caption));
        }
        let most = (POINTS_BUDGET / runs.len().max(1)).clamp(40, STEP_POINTS_MAX);
        let runs = runs
            .iter()
            .zip(gantts.into_iter().flatten())
            .map(|(run, (gantt, caption))| run_data(run, gantt, caption, most))
            .collect();
        Self { names: names.list, runs }
    }
}

fn run_data(run: &RunView, gantt: Gantt, caption: String, most: usize) -> RunData {
    let end_s = end_of(run);
    let tick_s = tick_of(end_s);
    let steps = |points: Vec<(f64, f64)>| {
        let thin = thin_steps(&points, end_s, most);
        let spans = if points.len() > MEAN_SPANS / 4 { MEAN_SPANS.min(most) } else { 0 };
        Steps {
            means: means(&points, end_s, spans)
                .into_iter()
                .map(|v| Number(v).rounded(1_000.0))
                .collect(),
            x: thin.iter().map(|p| Number(p.0.max(0.0) / tick_s).rounded(1.0)).collect(),
            y: thin.iter().map(|p| Number(p.1).rounded(1_000.0)).collect(),
        }
    };
    let cdf = distribution(&sorted_jcts(run), most.min(CDF_POINTS_MAX));
    RunData {
        label: run.label.clone(),
        gpus: run.gpus,
        nodes: run.nodes.clone(),
        end_s: Number(end_s),
        tick_s: Number(tick_s),
        cdf: Points {
            x: cdf.iter().map(|p| Number(p.0).significant()).collect(),
            y: cdf.iter().map(|p| Number(p.1).rounded(1e5)).collect(),
        },
        queue: steps(clean_steps(run.queue.iter().map(|&(t, n)| (t, f64::from(n))))),
        busy: steps(clean_steps(run.busy.iter().copied())),
        caption,
        gantt,
    }
}

impl Number {
    /// The nearest multiple of `1 / per_one`.
    fn rounded(self, per_one: f64) -> Self {
        Self((self.0 * per_one).round() / per_one)
    }

    /// Six significant digits.
    fn significant(self) -> Self {
        let digits = self.0.abs().log10().ceil().clamp(-9.0, 6.0);
        self.rounded(10f64.powf(6.0 - digits))
    }
}

/// The Gantt chart of one run in about `share` bytes, its caption, and the bytes it takes.
fn gantt(run: &RunView, names: &mut Names, share: usize) -> (Gantt, String, usize) {
    let end_s = end_of(run);
    let stays = clean_stays(run);
    let mut jobs: Vec<u32> = stays.iter().map(|s| s.job).collect();
    jobs.sort_unstable();
    jobs.dedup();
    let about = format!(
        "{}: {} of {} on {} over {}.",
        run.label,
        count(stays.len(), "stay"),
        count(jobs.len(), "job"),
        count(run.gpus as usize, "GPU"),
        duration(end_s)
    );
    let mut cost = stays.len() * STAY_BYTES + jobs.len() * JOB_BYTES + run.gpus as usize * 4;
    if stays.len() <= EXACT_STAYS_MAX && cost <= share {
        let named = |&job: &u32| names.cost(&job_name(run, job)) + names.cost(&job_team(run, job));
        cost += jobs.iter().map(named).sum::<usize>();
    }
    if stays.len() <= EXACT_STAYS_MAX && cost <= share {
        return (exact_gantt(run, &stays, jobs, names), about, cost);
    }
    let heat = heat(&stays, run.gpus, &run.nodes, end_s, share.min(HEAT_CELLS_MAX));
    let caption = format!(
        "{about} That is too much to draw stay by stay, so it is condensed: each cell is the part \
         of {} in which {} had a tenant.",
        duration(heat.col_s),
        if heat.gpus_per_row == 1 {
            "a GPU".to_owned()
        } else {
            format!("{} GPUs", heat.gpus_per_row)
        }
    );
    let used = heat.cells.len();
    let gantt = Gantt::Heat {
        gpus_per_row: heat.gpus_per_row,
        col_s: Number(heat.col_s),
        cols: heat.cols,
        cells: heat.cells,
    };
    (gantt, caption, used)
}

fn exact_gantt(run: &RunView, stays: &[Stay], jobs: Vec<u32>, names: &mut Names) -> Gantt {
    let tick_s = tick_of(end_of(run));
    let ticks = |seconds: f64| (seconds / tick_s).round() as u64;
    let mut per_gpu = vec![0; run.gpus as usize];
    let mut from = Vec::with_capacity(stays.len());
    let mut before = (u32::MAX, 0);
    for stay in stays {
        per_gpu[stay.gpu as usize] += 1;
        let start = ticks(stay.from_s);
        from.push(if before.0 == stay.gpu { start - before.1 } else { start });
        before = (stay.gpu, start);
    }
    let position = |job: u32| jobs.binary_search(&job).expect("jobs holds the job of each stay");
    Gantt::Stays {
        per_gpu,
        job: stays.iter().map(|s| position(s.job) as u32).collect(),
        from,
        length: stays.iter().map(|s| ticks(s.to_s) - ticks(s.from_s)).collect(),
        sm: stays.iter().map(|s| s.sm_permille).collect(),
        job_name: jobs.iter().map(|&j| names.id(&job_name(run, j))).collect(),
        job_team: jobs.iter().map(|&j| names.id(&job_team(run, j))).collect(),
        job_index: jobs,
    }
}

/// The stays that can be drawn, by GPU and time.
fn clean_stays(run: &RunView) -> Vec<Stay> {
    let mut stays: Vec<Stay> = run
        .stays
        .iter()
        .filter(|s| s.gpu < run.gpus && s.from_s.is_finite() && s.to_s.is_finite())
        .map(|s| Stay { from_s: s.from_s.max(0.0), to_s: s.to_s.max(0.0), ..*s })
        .filter(|s| s.from_s <= s.to_s)
        .collect();
    stays.sort_by(|a, b| {
        (a.gpu.cmp(&b.gpu)).then(a.from_s.total_cmp(&b.from_s)).then(a.job.cmp(&b.job))
    });
    stays
}

fn sorted_jcts(run: &RunView) -> Vec<f64> {
    let mut sorted: Vec<f64> =
        run.jcts_s.iter().copied().filter(|j| j.is_finite()).map(|j| j.max(0.0)).collect();
    sorted.sort_by(f64::total_cmp);
    sorted
}

fn job_name(run: &RunView, job: u32) -> String {
    run.job_names.get(job as usize).cloned().unwrap_or_else(|| format!("job {job}"))
}

fn job_team(run: &RunView, job: u32) -> String {
    run.job_teams.get(job as usize).cloned().unwrap_or_default()
}

fn end_of(run: &RunView) -> f64 {
    if run.end_s.is_finite() { run.end_s.max(0.0) } else { 0.0 }
}

/// A power of ten that divides the run into one to ten million parts: far finer than a pixel, and
/// few digits to write.
fn tick_of(end_s: f64) -> f64 {
    if end_s > 0.0 { 10f64.powf(end_s.log10().ceil() - 7.0) } else { 1e-3 }
}

#[cfg(test)]
mod tests;
