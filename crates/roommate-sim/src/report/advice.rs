//! The advice for a cluster as a page that can be handed on: what follows, savings with their
//! intervals, all figures, and what was assumed. It has no names of jobs, users or teams.

use super::Frame;
use super::text::{count, duration, html, number};
use crate::advice::{Advice, Interval, Standing, UnderTruth, Verdict, hours, percent};
use serde::Serialize;
use std::fmt::Write as _;

const SCRIPT: &str = concat!(include_str!("words.js"), include_str!("advice.js"));

/// What the page says beside the advice itself.
#[derive(Clone, Debug)]
pub struct Page {
    /// Name of the history.
    pub title: String,
    /// Its number of jobs.
    pub jobs: usize,
    /// Seconds from the first submission to the last.
    pub span_s: f64,
    /// Its work.
    pub gpu_hours: f64,
    /// The assumed cluster.
    pub cluster: String,
    /// Its GPUs.
    pub gpus: u32,
    /// The policy that others are compared with.
    pub today: String,
    /// What was left out of the history or changed.
    pub remarks: Vec<String>,
    /// What was assumed of the cluster and the worlds.
    pub said: Vec<String>,
    /// Name and summary of each truth.
    pub truths: Vec<(String, String)>,
    /// The command that repeats the result.
    pub command: String,
}

#[derive(Serialize)]
struct Data {
    runs: [(); 0],
}

/// The whole page.
pub fn advice(page: &Page, advice: &Advice) -> String {
    let mut body = String::with_capacity(32_768);
    push_advice(&mut body, page, advice);
    body.push_str("<div class=\"charts even\">\n");
    let chart = Chart { id: "sooner", heading: "Jobs finish sooner by", shown: percent };
    let caption = format!("Mean completion time, compared with {}.", page.today);
    chart.push(&mut body, &caption, advice, |one| one.sooner);
    let chart = Chart { id: "saved", heading: "GPU-hours saved", shown: hours };
    let caption = format!("GPU time that jobs held, compared with {}.", page.today);
    chart.push(&mut body, &caption, advice, |one| one.saved_gpu_hours);
    body.push_str("</div>\n");
    push_figures(&mut body, advice);
    push_truths(&mut body, page, advice);
    push_assumptions(&mut body, page);
    push_repeat(&mut body, page);
    let subtitle = format!(
        "{} in {} · {} GPU-hours · cluster {} ({})",
        count(page.jobs, "job"),
        duration(page.span_s),
        number(page.gpu_hours.round()),
        page.cluster,
        count(page.gpus as usize, "GPU")
    );
    let title = format!("Which policy for {}?", page.title);
    let frame =
        Frame { title: &title, subtitle: &subtitle, script: SCRIPT, maker: "roommate advise" };
    frame.around(&body, &Data { runs: [] })
}

fn open(page: &mut String, id: &str, heading: &str) {
    let _ = write!(
        page,
        "<section class=\"card\" id=\"{id}\" aria-labelledby=\"h-{id}\">\n<h2 id=\"h-{id}\">{}</h2>\n",
        html(heading)
    );
}

fn push_advice(page: &mut String, about: &Page, advice: &Advice) {
    open(page, "advice", "Advice");
    for (i, sentence) in advice.advice.iter().enumerate() {
        let class = if i == 0 { " class=\"lead\"" } else { "" };
        let _ = writeln!(page, "<p{class}>{}</p>", html(sentence));
    }
    let checked = match (advice.recorded_wait_s, advice.policies.first()) {
        (Some(recorded), Some(today)) => format!(
            "Mean wait of a job: {} in the history, {} with {} in the simulation. ",
            duration(recorded.round()),
            duration(today.mean_wait_s.round()),
            about.today
        ),
        _ => String::new(),
    };
    let _ = write!(
        page,
        "<p class=\"muted\">{}This is a simulation of the past, not a promise: what it assumes is \
         below.</p>\n</section>\n",
        html(&checked)
    );
}

/// Height in pixels of a bar and of its share of a row.
const BAR: usize = 6;
const LINE: usize = 10;

/// Colours of bars, in the style sheet.
const COLOURS: usize = 4;

/// A figure with a row for each policy and a bar for each truth: the interval, its mean, and a line
/// at no difference. The tables have the same numbers, so it is hidden from screen readers.
struct Chart {
    id: &'static str,
    heading: &'static str,
    shown: fn(f64) -> String,
}

impl Chart {
    fn push(
        &self,
        page: &mut String,
        caption: &str,
        advice: &Advice,
        of: fn(&UnderTruth) -> Interval,
    ) {
        let Self { id, heading, .. } = self;
        let others = || advice.policies.iter().filter(|one| one.verdict != Verdict::Today);
        let axis = Axis::over(others().flat_map(|one| one.by_truth.iter().map(of)));
        let _ = write!(
            page,
            "<figure class=\"card\" id=\"fig-{id}\" aria-labelledby=\"h-{id}\">\n\
             <h2 id=\"h-{id}\">{heading}</h2>\n<div class=\"bars\" aria-hidden=\"true\">\n\
             <ul class=\"legend\">"
        );
        let truths = others().next().into_iter().flat_map(|one| &one.by_truth);
        for (i, one) in truths.enumerate() {
            let swatch = format!("<svg class=\"swatch s{}\"><rect/></svg>", i % COLOURS);
            let _ = write!(page, "<li>{swatch}{}</li>", html(&one.truth));
        }
        page.push_str("</ul>\n<div class=\"lanes spans\">\n");
        for one in others() {
            let height = one.by_truth.len() * LINE + LINE;
            let (name, lines) = (html(&one.policy), axis.lines(height));
            let _ =
                write!(page, "<span>{name}</span><svg class=\"lane\" height=\"{height}\">{lines}");
            for (i, truth) in one.by_truth.iter().enumerate() {
                let about = format!("{name}, {}", html(&truth.truth));
                page.push_str(&self.bar(i, &about, &of(truth), &axis));
            }
            page.push_str("</svg>\n");
        }
        let _ = write!(
            page,
            "<span></span><svg class=\"lane\" height=\"18\">{}</svg>\n</div>\n</div>\n\
             <figcaption class=\"muted\">{} Marks are means, bars 95 % intervals over seeds; a bar \
             across the line of 0 is no difference that can be shown.</figcaption>\n</figure>\n",
            axis.labels(self.shown),
            html(caption)
        );
    }

    fn bar(&self, i: usize, about: &str, interval: &Interval, axis: &Axis) -> String {
        let (low, high) = (axis.at(interval.low), axis.at(interval.high));
        let middle = LINE / 2 + i * LINE + LINE / 2;
        format!(
            "<g class=\"s{}\"><title>{about}: {}</title><rect class=\"wide\" x=\"{low:.2}%\" \
             y=\"{}\" width=\"{:.2}%\" height=\"{BAR}\"/><circle cx=\"{:.2}%\" cy=\"{middle}\" \
             r=\"3.5\"/></g>",
            i % COLOURS,
            ranged(interval, self.shown),
            middle - BAR / 2,
            (high - low).max(0.2),
            axis.at(interval.mean)
        )
    }
}

/// The horizontal axis of a chart, in percent of its width.
struct Axis {
    low: f64,
    high: f64,
    step: f64,
}

/// Room at both ends, in percent of the width, for half a label.
const MARGIN: f64 = 8.0;

impl Axis {
    /// Round numbers around all intervals and 0.
    fn over(intervals: impl Iterator<Item = Interval>) -> Self {
        let (low, high) =
            intervals.fold((0.0f64, 0.0f64), |(low, high), i| (low.min(i.low), high.max(i.high)));
        let span = if high > low { high - low } else { 1.0 };
        let rough = span / 4.0;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * power);
        let step = step.into_iter().find(|s| *s >= rough * 0.999).unwrap_or(rough);
        let (low, high) = ((low / step).floor() * step, (high / step).ceil() * step);
        Self { low, high: if high > low { high } else { low + step }, step }
    }

    fn at(&self, value: f64) -> f64 {
        MARGIN + (value - self.low) / (self.high - self.low) * (100.0 - 2.0 * MARGIN)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        let n = ((self.high - self.low) / self.step).round() as u32;
        (0..=n).map(|i| self.low + f64::from(i) * self.step)
    }

    fn lines(&self, height: usize) -> String {
        let line = |v: f64| {
            let class = if v.abs() < self.step / 1e3 { "zero" } else { "grid" };
            let x = self.at(v);
            format!(
                "<line class=\"{class}\" x1=\"{x:.2}%\" x2=\"{x:.2}%\" y1=\"0\" y2=\"{height}\"/>"
            )
        };
        self.ticks().map(line).collect()
    }

    fn labels(&self, shown: fn(f64) -> String) -> String {
        let label = |v: f64| {
            let v = if v.abs() < self.step / 1e3 { 0.0 } else { v };
            format!(
                "<text x=\"{:.2}%\" y=\"13\" text-anchor=\"middle\">{}</text>",
                self.at(v),
                html(&shown(v))
            )
        };
        self.ticks().map(label).collect()
    }
}

fn verdict(one: &Standing) -> &'static str {
    match one.verdict {
        Verdict::Today => "today",
        Verdict::Sooner => "sooner under every truth",
        Verdict::SoonerOrEqual => "sooner or no difference",
        Verdict::NoDifference => "no difference that can be shown",
        Verdict::Depends => "sooner or later, by the truth",
        Verdict::Later => "later",
        Verdict::Unfinished => "does not finish all jobs",
    }
}

fn ranged(interval: &Interval, shown: fn(f64) -> String) -> String {
    format!("{} ({} to {})", shown(interval.mean), shown(interval.low), shown(interval.high))
}

fn table(page: &mut String, id: &str, heads: &[&str]) {
    let _ = write!(
        page,
        "<div class=\"scroll\" role=\"region\" aria-labelledby=\"h-{id}\" tabindex=\"0\">\n\
         <table>\n<thead><tr>"
    );
    heads.iter().for_each(|head| {
        let _ = write!(page, "<th scope=\"col\">{}</th>", html(head));
    });
    page.push_str("</tr></thead>\n<tbody>\n");
}

fn row(page: &mut String, name: &str, cells: &[String]) {
    let _ = write!(page, "<tr><th scope=\"row\">{}</th>", html(name));
    cells.iter().for_each(|cell| {
        let _ = write!(page, "<td>{}</td>", html(cell));
    });
    page.push_str("</tr>\n");
}

fn push_figures(page: &mut String, advice: &Advice) {
    open(page, "figures", "All policies");
    let heads = [
        "Policy",
        "Mean JCT",
        "p99 JCT",
        "Mean wait",
        "GPU held",
        "Finished sooner by",
        "GPU-hours saved",
        "Verdict",
    ];
    table(page, "figures", &heads);
    for one in &advice.policies {
        let saved = Interval { mean: one.saved_gpu_hours, low: one.low, high: one.high };
        let (sooner, less) = match one.verdict {
            Verdict::Today => ("–".to_owned(), "–".to_owned()),
            _ => (ranged(&one.sooner, percent), ranged(&saved, hours)),
        };
        let times = [one.mean_jct_s, one.p99_jct_s, one.mean_wait_s].map(|s| duration(s.round()));
        let mut cells = times.to_vec();
        cells.extend([percent(one.gpu_held), sooner, less, verdict(one).to_owned()]);
        row(page, &one.policy, &cells);
    }
    if let Some(bound) = advice.bound_s {
        row(page, "lower bound", &[duration(bound.round())]);
    }
    page.push_str(
        "</tbody>\n</table>\n</div>\n<p class=\"muted\">JCT is the job completion time, from \
         submission to the end. GPU held is the part of all GPU time that jobs held. No policy can \
         have a mean JCT below the lower bound.</p>\n</section>\n",
    );
}

fn push_truths(page: &mut String, about: &Page, advice: &Advice) {
    open(page, "truths", "Finished sooner, by what is assumed of roommates");
    let heads: Vec<&str> =
        ["Policy"].into_iter().chain(about.truths.iter().map(|t| t.0.as_str())).collect();
    table(page, "truths", &heads);
    for one in advice.policies.iter().filter(|one| one.verdict != Verdict::Today) {
        let cells: Vec<String> = one.by_truth.iter().map(|t| ranged(&t.sooner, percent)).collect();
        row(page, &one.policy, &cells);
    }
    page.push_str("</tbody>\n</table>\n</div>\n");
    for (name, summary) in &about.truths {
        let _ = writeln!(
            page,
            "<p class=\"muted\"><code>{}</code>: {}.</p>",
            html(name),
            html(summary)
        );
    }
    page.push_str("</section>\n");
}

/// What holds for every advice.
const ASSUMED: [&str; 6] = [
    "A history does not tell what kind of work its jobs were. Jobs of one user under the same name \
     are taken as one kind, and each kind is one of the training tasks that were measured on an \
     H200, drawn by seed; names of measured models keep their task. Most of these tasks leave a part \
     of an H200 idle. If your jobs fill their GPUs, the truth saturated is yours.",
    "It does not tell what a restart costs, or that jobs can be restarted at all: all are taken to \
     continue after one, and to lose the time that it costs.",
    "True speeds beside roommates scatter by a tenth around each truth. Policies are not told how \
     long a step takes; they learn it while jobs run.",
    "Jobs come when they came, ask for the same GPUs, and take as long as they took when they have \
     these for themselves, on the GPU model on which they ran.",
    "The cluster is empty when the first job comes. Nodes do not fail, and jobs do not wait for \
     anything but GPUs: quotas, priorities and reservations of the real cluster are not known.",
    "The intervals are about what was drawn and assumed. They do not say how much another month \
     would differ from this one.",
];

fn push_assumptions(page: &mut String, about: &Page) {
    open(page, "assumed", "What was assumed");
    page.push_str("<ul class=\"said\">\n");
    let own = about.said.iter().chain(&about.remarks).map(String::as_str);
    for sentence in own.chain(ASSUMED) {
        let _ = writeln!(page, "<li>{}</li>", html(sentence));
    }
    page.push_str("</ul>\n</section>\n");
}

fn push_repeat(page: &mut String, about: &Page) {
    open(page, "repeat", "Repeat it");
    let _ = write!(
        page,
        "<pre class=\"scroll\"><code>{}</code></pre>\n<p class=\"muted\">The same history, seeds \
         and version of the program give the same page.</p>\n</section>\n",
        html(&about.command)
    );
}
