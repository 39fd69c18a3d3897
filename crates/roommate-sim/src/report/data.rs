//! The data that the page embeds for its scripts: curves thinned to the resolution of a screen, and
//! Gantt charts within a budget of bytes.

use super::condense::{clean_steps, distribution, heat, means, thin_steps};
use super::text::{self, count, duration, script_safe};
use super::{RunView, Stay};
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;

/// Most points of one step function: more than a wide screen has pixels.
pub(super) const STEP_POINTS_MAX: usize = 2_000;
/// Most points of one distribution: steps of 0.2 %.
pub(super) const CDF_POINTS_MAX: usize = 500;
/// Spans of a run over which a step function with many changes is averaged: about two pixels each.
const MEAN_SPANS: usize = 400;
/// Most points of each type of figure over all runs, so that the page stays small with many runs.
const POINTS_BUDGET: usize = 32_000;
/// Bytes of the page for all Gantt charts. With the points above the page stays below 5 MB.
pub(super) const GANTT_BUDGET_BYTES: usize = 3_200_000;
/// Most stays that are drawn individually; with more, zooming in a browser is too slow.
const EXACT_STAYS_MAX: usize = 50_000;
/// Bytes that one stay and one job take in the embedded data, measured and rounded up.
const STAY_BYTES: usize = 26;
const JOB_BYTES: usize = 18;
/// Most cells of one heatmap.
const HEAT_CELLS_MAX: usize = 205_000;

/// The embedded data. Times of a run are multiples of its `tick_s`.
#[derive(Serialize)]
pub(super) struct PageData {
    names: Vec<String>,
    /// Runs whose curves are drawn initially, best first.
    drawn: Vec<usize>,
    pub(super) runs: Vec<RunData>,
}

#[derive(Serialize)]
pub(super) struct RunData {
    pub(super) label: String,
    gpus: u32,
    nodes: Vec<(u32, u32)>,
    end_s: Number,
    tick_s: Number,
    cdf: Points,
    queue: Steps,
    busy: Steps,
    pub(super) caption: String,
    gantt: Gantt,
}

/// A polyline as two columns, which are shorter in JSON than pairs.
#[derive(Serialize)]
pub(super) struct Points {
    pub(super) x: Vec<Number>,
    pub(super) y: Vec<Number>,
}

/// A step function, and its means over equal spans of the run, which are drawn where it changes too
/// often; empty if it has few changes.
#[derive(Serialize)]
struct Steps {
    x: Vec<Number>,
    y: Vec<Number>,
    means: Vec<Number>,
}

#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub(super) enum Gantt {
    /// Stays in columns, sorted by GPU and time. `per_gpu` is the number of stays of each GPU;
    /// `from` is relative to the start of the previous stay on the same GPU; `job` is an index into
    /// the `job_*` columns.
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

/// A float, serialised as an integer if it is whole and as null if it is not finite.
#[derive(Clone, Copy)]
pub(super) struct Number(pub(super) f64);

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

/// Interned strings in order of first use; runs on one page mostly share job names.
#[derive(Default)]
pub(super) struct Names {
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
    pub(super) fn new(runs: &[RunView], drawn: Vec<usize>) -> Self {
        let mut names = Names::default();
        let mut gantts: Vec<Option<(Gantt, String)>> = runs.iter().map(|_| None).collect();
        // The smallest run first: the unused part of its share goes to the larger runs.
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
        Self { names: names.list, drawn, runs }
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
    pub(super) fn rounded(self, per_one: f64) -> Self {
        Self((self.0 * per_one).round() / per_one)
    }

    /// Six significant digits.
    pub(super) fn significant(self) -> Self {
        let digits = self.0.abs().log10().ceil().clamp(-9.0, 6.0);
        self.rounded(10f64.powf(6.0 - digits))
    }
}

/// The Gantt chart of one run in about `share` bytes, its caption, and its size in bytes.
pub(super) fn gantt(run: &RunView, names: &mut Names, share: usize) -> (Gantt, String, usize) {
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
        "{about} There are too many stays to draw each, so they are condensed: a cell shows the \
         share of {} in which {} had a tenant.",
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

pub(super) fn sorted_jcts(run: &RunView) -> Vec<f64> {
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

pub(super) fn end_of(run: &RunView) -> f64 {
    if run.end_s.is_finite() { run.end_s.max(0.0) } else { 0.0 }
}

/// A power of ten that divides the run into one to ten million parts: much finer than a pixel, and
/// short in JSON.
fn tick_of(end_s: f64) -> f64 {
    if end_s > 0.0 { 10f64.powf(end_s.log10().ceil() - 7.0) } else { 1e-3 }
}
