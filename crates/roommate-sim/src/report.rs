//! The HTML report: one self-contained page that compares runs and needs no network.
//!
//! This module has the view of a run, the tables, the captions, and the data that is embedded for
//! the figures. The scripts in `report/` draw the figures. Journals are read and metrics computed
//! elsewhere. The same runs give the same page, byte for byte.

mod advice;
mod all_figures;
mod condense;
mod data;
pub mod league;
mod services;
mod study;
mod text;
pub mod view;

pub use advice::{Page, advice};
pub use study::study;

use condense::{clean_steps, mean_over_time};
use data::{PageData, end_of, sorted_jcts};
use league::League;
use roommate_core::journal::metrics::Row;
use serde::Serialize;
use std::fmt::Write as _;
use text::{count, duration, html, script_safe};

const STYLE: &str = include_str!("report/style.css");
const SCRIPT: &str = concat!(
    include_str!("report/words.js"),
    include_str!("report/figures.js"),
    include_str!("report/gantt.js")
);

/// Most runs whose curves are drawn at the same time; more are hard to distinguish.
const DRAWN_MAX: usize = 6;

/// Everything the page shows of one run.
#[derive(Clone, Debug)]
pub struct RunView {
    /// The policy's name in the registry.
    pub policy: String,
    /// Label of the run, unique on a page.
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
    /// Metrics: the same in the same order for all runs of a page.
    pub figures: Vec<Row>,
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
    pub services: Vec<ServiceView>,
}

/// Latency and SLO of one service in a run.
#[derive(Clone, Debug)]
pub struct ServiceView {
    /// Its name.
    pub name: String,
    /// SLO for the 99th percentile.
    pub slo_ms: Option<f64>,
    /// Share of requests above the SLO.
    pub late: f64,
    /// Share of windows that miss the SLO.
    pub over: f64,
    /// Median latency.
    pub p50_ms: f64,
    /// 99th percentile, mean of windows.
    pub p99_ms: f64,
    /// The same of the worst window.
    pub worst_ms: f64,
    /// Requests per second that are answered within the SLO.
    pub goodput_rps: f64,
    /// Reports of the service, in order of time.
    pub stretches: Vec<Stretch>,
}

/// One report of a service, over several windows.
#[derive(Clone, Copy, Debug)]
pub struct Stretch {
    /// Start, in seconds since the run began.
    pub from_s: f64,
    /// End, in seconds since the run began.
    pub to_s: f64,
    /// 99th percentile, mean of windows.
    pub p99_ms: f64,
    /// The same of the worst window.
    pub worst_ms: f64,
    /// Share of windows that miss the SLO.
    pub over: f64,
}

/// An interval of one job on one GPU.
#[derive(Clone, Copy, Debug)]
pub struct Stay {
    /// Index of the job.
    pub job: u32,
    /// Index of the GPU in the cluster.
    pub gpu: u32,
    /// Start, in seconds since the run began.
    pub from_s: f64,
    /// End, in seconds since the run began.
    pub to_s: f64,
    /// SM share of the job.
    pub sm_permille: u16,
}

/// A table of text above the figures of single runs: a summary of many runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Card {
    /// Heading.
    pub heading: String,
    /// Explanation below the table.
    pub note: String,
    /// Cells; the first row and the first column are names.
    pub rows: Vec<Vec<String>>,
}

/// The whole page, with the best runs by mean completion time first.
pub fn render(title: &str, runs: &[RunView]) -> String {
    render_with(title, &[], runs, league::SORTED_BY)
}

/// The whole page, with the cards first and the runs sorted by the metric with key `sort`.
pub fn render_with(title: &str, cards: &[Card], runs: &[RunView], sort: &str) -> String {
    let figures: Vec<Vec<Row>> = runs.iter().map(|r| r.figures.clone()).collect();
    let league = League::new(&figures, sort);
    let drawn = league.order.iter().copied().take(DRAWN_MAX).collect();
    let data = PageData::new(runs, drawn);
    let mut body = String::with_capacity(32_768);
    cards.iter().enumerate().for_each(|(i, card)| push_card(&mut body, i, card));
    if runs.is_empty() {
        body.push_str("<section class=\"card\"><p>No runs to show.</p></section>\n");
    } else {
        let several = runs.len() > 1;
        if several {
            league::push(&mut body, runs, &league);
        } else {
            all_figures::push(&mut body, runs);
        }
        push_charts(&mut body, runs);
        services::push(&mut body, runs);
        push_gantt(&mut body, &data);
        if several {
            all_figures::push(&mut body, runs);
        }
        push_sources(&mut body, runs);
    }
    let frame =
        Frame { title, subtitle: &subtitle(runs), script: SCRIPT, maker: "roommate report" };
    frame.around(&body, &data)
}

/// The parts that all pages share: head, theme, data and scripts.
struct Frame<'a> {
    title: &'a str,
    subtitle: &'a str,
    script: &'a str,
    /// The command that generated the page.
    maker: &'a str,
}

impl Frame<'_> {
    fn around(&self, body: &str, data: &impl Serialize) -> String {
        let json = serde_json::to_string(data).expect("strings and numbers always serialise");
        let size = json.len() + STYLE.len() + self.script.len() + body.len() + 4_096;
        let mut page = String::with_capacity(size);
        let shown = html(self.title);
        // The nonce blocks inline event handlers and injected scripts, in case some text is not
        // escaped. Everything else, in particular network access, is forbidden.
        let _ = write!(
            page,
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; \
             style-src 'nonce-report'; script-src 'nonce-report'; base-uri 'none'; \
             form-action 'none'\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n\
             <meta name=\"generator\" content=\"roommate\">\n\
             <title>{shown}</title>\n<style nonce=\"report\">\n{STYLE}</style>\n</head>\n<body>\n\
             <header class=\"top\">\n<div>\n<h1>{shown}</h1>\n<p class=\"muted\">{}</p>\n</div>\n\
             <button type=\"button\" id=\"theme\" class=\"quiet\">Theme</button>\n</header>\n\
             <main>\n\
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

/// Cluster and seed, if all runs have the same.
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

fn push_card(page: &mut String, number: usize, card: &Card) {
    let _ = write!(
        page,
        "<section class=\"card\" aria-labelledby=\"h-card{number}\">\n\
         <h2 id=\"h-card{number}\">{}</h2>\n\
         <div class=\"scroll\" role=\"region\" aria-labelledby=\"h-card{number}\" tabindex=\"0\">\n\
         <table>\n",
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

/// A sentence that names the extremes among runs, for readers who cannot see the figure.
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
         <h2 id=\"h-gantt\">Jobs on GPUs over time</h2>\n<div class=\"tools\">\
         <button type=\"button\" id=\"zoom-out\" aria-label=\"Zoom out\">−</button>\
         <button type=\"button\" id=\"zoom-in\" aria-label=\"Zoom in\">+</button>\
         <button type=\"button\" id=\"zoom-reset\" disabled>Reset zoom</button></div></div>\n\
         <div class=\"tabs\" role=\"tablist\" aria-label=\"Run\">\n",
    );
    for (i, run) in data.runs.iter().enumerate() {
        let _ = writeln!(
            page,
            "<button type=\"button\" role=\"tab\" id=\"tab-{i}\" aria-controls=\"gantt-panel\" \
             aria-selected=\"{}\" tabindex=\"{}\"><span class=\"key\" data-run=\"{i}\"></span>{}\
             </button>",
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

#[cfg(test)]
mod tests;
