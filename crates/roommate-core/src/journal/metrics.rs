//! Metrics: one fold over a journal computes every figure that is printed. Definitions are only
//! here.

use crate::event::{Action, Event, Served};
use crate::idx::{GpuSet, IdxVec, JobIdx, ProfileIdx};
use crate::job::Class;
use crate::journal::occupancy::Occupancy;
use crate::journal::{Head, JobLine, Observer, ProfileLine, StepView};
use crate::knobs::Knobs;
use crate::math::stat;
use crate::number::{Number, Positive};
use crate::profile::{Profile, STAGES};
use crate::time::{Span, Time};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Whether a smaller or a larger value is better.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Better {
    /// Smaller is better.
    Lower,
    /// Larger is better.
    Higher,
    /// Neither direction is better.
    Neither,
}

/// A metric with its name, for tables.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Key in JSON and CSV.
    pub key: &'static str,
    /// Name shown to users.
    pub label: &'static str,
    /// `s`, `share` (0 to 1) or nothing.
    pub unit: &'static str,
    /// The value; `None` where it does not apply.
    pub value: Option<f64>,
    /// Which direction is better.
    pub better: Better,
}

/// The metrics of one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Metrics {
    /// Jobs submitted, excluding services.
    pub jobs: u64,
    /// Jobs that completed their work.
    pub finished: u64,
    /// Jobs that failed permanently.
    pub failed: u64,
    /// Jobs rejected.
    pub rejected: u64,
    /// Mean of completion − submission over finished jobs.
    pub avg_jct_s: Option<f64>,
    /// Median completion time.
    pub median_jct_s: Option<f64>,
    /// 90th percentile of completion time: rank `trunc(0.9 n)`.
    pub p90_jct_s: Option<f64>,
    /// 99th percentile of completion time: rank `trunc(0.99 n)`.
    pub p99_jct_s: Option<f64>,
    /// Time of the last completion; the run begins at 0.
    pub makespan_s: f64,
    /// Mean time without GPUs between submission and completion, finished jobs.
    pub avg_queue_s: Option<f64>,
    /// 99th percentile of queueing time.
    pub p99_queue_s: Option<f64>,
    /// Times that a running job was asked to leave its GPUs.
    pub preemptions: u64,
    /// Times that a running job moved to other GPUs, or to more or fewer.
    pub moves: u64,
    /// Attempts that failed, by the job's own fault or by a node's.
    pub failures: u64,
    /// GPU time allocated ÷ GPU time available up to the makespan, weighted by SM share.
    pub gpu_util: Option<f64>,
    /// Share of GPU memory allocated, where requests and capacities are known.
    pub mem_util: Option<f64>,
    /// Share of CPU allocated, where requests and capacities are known.
    pub cpu_util: Option<f64>,
    /// Busy share of storage, CPU, GPU and network per GPU, from the stage times of finished work.
    pub stage_util: Option<[f64; 4]>,
    /// Measuring windows in which more than 1 % of requests were late, so that the 99th percentile
    /// was above the SLO.
    pub slo_misses: u64,
    /// Measuring windows of services with an SLO; windows without requests count as kept.
    pub slo_windows: u64,
    /// Metrics of each service; services without requests are left out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<ServiceFigures>,
    /// Jobs with a deadline that finished late or not at all.
    pub deadline_misses: u64,
    /// Jobs with a deadline.
    pub deadline_jobs: u64,
    /// Mean over jobs with a deadline of value achieved ÷ value achievable: 1 or 0, or the value of
    /// the deadline that was met where a job has several.
    pub deadline_worth: Option<f64>,
    /// Mean completion time of finished jobs with a deadline.
    pub avg_jct_deadline_s: Option<f64>,
    /// Mean completion time of finished best-effort jobs.
    pub avg_jct_best_effort_s: Option<f64>,
    /// Mean finish-time fairness: completion time ÷ the time with an equal share of the cluster.
    pub avg_rho: Option<f64>,
    /// The worst finish-time fairness of any job.
    pub max_rho: Option<f64>,
    /// Jain's index over jobs of (time alone ÷ completion time).
    pub jain: Option<f64>,
    /// Mean of time on GPUs ÷ time alone on them over guaranteed jobs: the cost of roommates and
    /// restarts.
    pub stretch_guaranteed: Option<f64>,
    /// 99th percentile of the same ratio over guaranteed jobs.
    pub p99_stretch_guaranteed: Option<f64>,
    /// Mean of the same ratio over best-effort jobs.
    pub stretch_best_effort: Option<f64>,
    /// Number of policy calls.
    pub events: u64,
}

/// Metrics of one service.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ServiceFigures {
    /// Its name.
    pub name: String,
    /// Its SLO for the 99th percentile, µs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slo_us: Option<u32>,
    /// Totals over all its windows.
    #[serde(flatten)]
    pub served: Served,
    /// Seconds that the totals cover.
    pub span_s: f64,
    /// Requests answered in time, per second.
    pub goodput_rps: f64,
}

impl Metrics {
    /// Totals over all services; `None` without services.
    pub fn served(&self) -> Option<Served> {
        self.services.iter().map(|s| s.served).reduce(Served::and)
    }

    /// The metrics as rows of a table, always the same rows in the same order.
    pub fn rows(&self) -> Vec<Row> {
        use Better::{Higher, Lower, Neither};
        let row =
            |key, label, unit, value: Option<f64>, better| Row { key, label, unit, value, better };
        let count = |n: u64| Some(n as f64);
        let share = |part: u64, of: u64| (of > 0).then(|| part as f64 / of as f64);
        let stage = |i: usize| self.stage_util.map(|s| s[i]);
        let mut rows = vec![
            row("jobs", "jobs", "", count(self.jobs), Neither),
            row("finished", "finished", "", count(self.finished), Higher),
            row("avg_jct_s", "mean completion time", "s", self.avg_jct_s, Lower),
            row("median_jct_s", "median completion time", "s", self.median_jct_s, Lower),
            row("p90_jct_s", "p90 completion time", "s", self.p90_jct_s, Lower),
            row("p99_jct_s", "p99 completion time", "s", self.p99_jct_s, Lower),
            row("makespan_s", "makespan", "s", Some(self.makespan_s), Lower),
            row("avg_queue_s", "mean queueing", "s", self.avg_queue_s, Lower),
            row("p99_queue_s", "p99 queueing", "s", self.p99_queue_s, Lower),
            row("preemptions", "preemptions", "", count(self.preemptions), Lower),
            row("moves", "moves", "", count(self.moves), Lower),
            row("failures", "failed attempts", "", count(self.failures), Neither),
            row("failed", "failed for good", "", count(self.failed), Lower),
            row("rejected", "rejected", "", count(self.rejected), Lower),
            row("gpu_util", "GPU time held", "share", self.gpu_util, Neither),
            row("mem_util", "GPU memory held", "share", self.mem_util, Neither),
            row("cpu_util", "CPU held", "share", self.cpu_util, Neither),
            row("storage_util", "storage busy", "share", stage(0), Neither),
            row("prep_util", "CPU busy", "share", stage(1), Neither),
            row("compute_util", "GPU busy", "share", stage(2), Neither),
            row("network_util", "network busy", "share", stage(3), Neither),
        ];
        rows.extend(self.service_rows());
        rows.extend([
            row(
                "deadline_misses",
                "deadline misses",
                "share",
                share(self.deadline_misses, self.deadline_jobs),
                Lower,
            ),
            row("deadline_worth", "value of deadlines met", "share", self.deadline_worth, Higher),
            row(
                "avg_jct_deadline_s",
                "completion, with deadline",
                "s",
                self.avg_jct_deadline_s,
                Lower,
            ),
            row(
                "avg_jct_best_effort_s",
                "completion, best effort",
                "s",
                self.avg_jct_best_effort_s,
                Lower,
            ),
            row("avg_rho", "finish-time fairness, mean", "", self.avg_rho, Lower),
            row("max_rho", "finish-time fairness, worst", "", self.max_rho, Lower),
            row("jain", "Jain index", "", self.jain, Higher),
            row(
                "stretch_guaranteed",
                "stretch, guaranteed, mean",
                "",
                self.stretch_guaranteed,
                Lower,
            ),
            row(
                "p99_stretch_guaranteed",
                "stretch, guaranteed, p99",
                "",
                self.p99_stretch_guaranteed,
                Lower,
            ),
            row(
                "stretch_best_effort",
                "stretch, best effort, mean",
                "",
                self.stretch_best_effort,
                Lower,
            ),
        ]);
        rows
    }

    /// The rows about services.
    fn service_rows(&self) -> Vec<Row> {
        use Better::{Higher, Lower, Neither};
        let row =
            |key, label, unit, value: Option<f64>, better| Row { key, label, unit, value, better };
        let share = |part: u64, of: u64| (of > 0).then(|| part as f64 / of as f64);
        let served = self.served();
        let of_served = |of: &dyn Fn(&Served) -> f64| served.as_ref().map(of);
        let goodput = served.map(|_| self.services.iter().map(|s| s.goodput_rps).sum());
        vec![
            row("services", "services", "", Some(self.services.len() as f64), Neither),
            row(
                "late_requests",
                "requests over the SLO",
                "share",
                served.and_then(|s| share(s.late, s.requests)),
                Lower,
            ),
            row(
                "slo_misses",
                "windows over the SLO",
                "share",
                share(self.slo_misses, self.slo_windows),
                Lower,
            ),
            row("p50_ms", "median latency", "ms", of_served(&|s| ms(s.p50_us)), Lower),
            row(
                "p99_ms",
                "p99 latency, mean of windows",
                "ms",
                of_served(&|s| ms(s.p99_us)),
                Lower,
            ),
            row(
                "worst_p99_ms",
                "p99 latency, worst window",
                "ms",
                of_served(&|s| ms(s.worst_us)),
                Lower,
            ),
            row("goodput_rps", "requests in time", "/s", goodput, Higher),
        ]
    }
}

/// What the fold keeps of a job until it ends.
#[derive(Clone, Debug, Default)]
struct Live {
    submitted: Time,
    /// When it last acquired or released GPUs.
    since: Time,
    held: Option<Held>,
    waited: Span,
    /// Time with GPUs so far.
    ran: Span,
    best_effort: bool,
    /// Integral of the number of jobs in the system at its submission, job-seconds.
    crowd: f64,
    gpus: u16,
    alone_s: Option<f64>,
    stages_gpu_s: Option<[f64; 4]>,
    deadline: Option<Time>,
    /// For a job with several deadlines: the value of each.
    deadline_values: Vec<(Time, Number)>,
    slo_us: Option<u32>,
    /// Name and totals of a service; job metrics leave it out.
    service: Option<Box<(String, Served)>>,
    present: bool,
}

fn ms(us: u32) -> f64 {
    f64::from(us) / 1e3
}

#[derive(Clone, Debug)]
struct Held {
    gpus: GpuSet,
    knobs: Knobs,
}

/// Folds a journal into metrics.
#[derive(Debug, Default)]
pub struct Fold {
    totals: Metrics,
    live: IdxVec<JobIdx, Live>,
    profiles: IdxVec<ProfileIdx, (Option<Positive>, Option<[Number; 4]>)>,
    gpus: u32,
    mem_mib: f64,
    cpu_milli: f64,
    jcts_s: Vec<f64>,
    /// Completion times of jobs with a deadline, and of best-effort jobs.
    jcts_deadline_s: Vec<f64>,
    jcts_best_effort_s: Vec<f64>,
    /// Sum over jobs of the value of the deadline met ÷ the value achievable.
    kept: f64,
    queues_s: Vec<f64>,
    rhos: Vec<f64>,
    paces: Vec<f64>,
    /// Time on GPUs ÷ time alone: guaranteed jobs and services, then best-effort jobs.
    stretches: [Vec<f64>; 2],
    last_finish: Time,
    last_step: Time,
    present: u32,
    crowd: f64,
    occupancy: Occupancy,
    held_since: Time,
    held_permille_us: u128,
    held_mem: f64,
    held_cpu: f64,
    stages_gpu_s: Option<[f64; 4]>,
    /// The jobs to be measured, in order of submission; all if `None`.
    measure: Option<Range<u32>>,
}

impl Live {
    /// Value of finishing now ÷ value achievable; only for jobs with a deadline.
    fn deadline_value(&self, at: Time) -> f64 {
        let Some((_, most)) = self.deadline_values.first().filter(|(_, most)| *most > 0.0) else {
            return f64::from(u8::from(self.deadline.is_some_and(|d| at <= d)));
        };
        self.deadline_values
            .iter()
            .find(|(by, _)| at <= *by)
            .map_or(0.0, |(_, value)| *value / *most)
    }
}

impl Fold {
    /// Restricts job metrics to these jobs, in order of submission. Cluster metrics (GPU time
    /// allocated, preemptions, events) still cover the whole run.
    pub fn measuring(jobs: Option<Range<u32>>) -> Self {
        Self { measure: jobs, ..Self::default() }
    }

    fn counts(&self, job: JobIdx) -> bool {
        self.measure.as_ref().is_none_or(|m| m.contains(&job.0))
    }

    /// Completion times of finished jobs, in order of completion.
    pub fn jcts_s(&self) -> &[f64] {
        &self.jcts_s
    }

    /// GPUs held now; a shared GPU counts once.
    pub fn held_gpus(&self) -> f64 {
        self.occupancy.permille() as f64 / 1000.0
    }

    /// The metrics so far.
    pub fn metrics(&self) -> Metrics {
        let mut m = self.totals.clone();
        let sorted = |values: &[f64]| {
            let mut v = values.to_vec();
            v.sort_unstable_by(f64::total_cmp);
            v
        };
        let jcts = sorted(&self.jcts_s);
        m.avg_jct_s = stat::mean(&self.jcts_s);
        m.median_jct_s = stat::median(&jcts);
        m.p90_jct_s = stat::quantile(&jcts, 0.90);
        m.p99_jct_s = stat::quantile(&jcts, 0.99);
        m.avg_jct_deadline_s = stat::mean(&self.jcts_deadline_s);
        m.avg_jct_best_effort_s = stat::mean(&self.jcts_best_effort_s);
        m.deadline_worth = (m.deadline_jobs > 0).then(|| self.kept / m.deadline_jobs as f64);
        m.avg_queue_s = stat::mean(&self.queues_s);
        m.p99_queue_s = stat::quantile(&sorted(&self.queues_s), 0.99);
        m.makespan_s = self.last_finish.secs();
        let over = |held: f64, exists: f64| (exists > 0.0).then(|| held / exists);
        let gpu_s = f64::from(self.gpus) * m.makespan_s;
        m.gpu_util = over(self.held_permille_us as f64 / 1e9, gpu_s);
        m.mem_util = over(self.held_mem, self.mem_mib * m.makespan_s).filter(|u| *u > 0.0);
        m.cpu_util = over(self.held_cpu, self.cpu_milli * m.makespan_s).filter(|u| *u > 0.0);
        m.stage_util = self.stages_gpu_s.filter(|_| gpu_s > 0.0).map(|s| s.map(|v| v / gpu_s));
        m.avg_rho = stat::mean(&self.rhos);
        m.max_rho = self.rhos.iter().copied().max_by(f64::total_cmp);
        m.jain = stat::jain(&self.paces);
        m.stretch_guaranteed = stat::mean(&self.stretches[0]);
        m.p99_stretch_guaranteed = stat::quantile(&sorted(&self.stretches[0]), 0.99);
        m.stretch_best_effort = stat::mean(&self.stretches[1]);
        // Jobs with a deadline that had not finished at the end.
        let late = |(i, l): &(JobIdx, &Live)| l.present && l.deadline.is_some() && self.counts(*i);
        m.deadline_misses += self.live.iter_enumerated().filter(late).count() as u64;
        m.services = self.live.iter().filter_map(|l| self.service_figures(l)).collect();
        m
    }

    fn service_figures(&self, live: &Live) -> Option<ServiceFigures> {
        let (name, served) = live.service.as_deref().filter(|(_, s)| s.windows > 0)?;
        let span_s = (live.since.max(self.last_step) - live.submitted).secs();
        let in_time = (served.requests - served.late.min(served.requests)) as f64;
        Some(ServiceFigures {
            name: name.clone(),
            slo_us: live.slo_us,
            served: *served,
            span_s,
            goodput_rps: if span_s > 0.0 { in_time / span_s } else { 0.0 },
        })
    }

    fn leave_gpus(&mut self, job: JobIdx, at: Time) {
        let live = &mut self.live[job];
        let span = at - live.since;
        live.since = at;
        if let Some(held) = live.held.take() {
            live.ran = live.ran + span;
            let gpu_s = held.gpus.len() as f64 * span.secs();
            self.count_held(at);
            self.occupancy.leave(&held.gpus, held.knobs);
            self.held_mem += gpu_s * f64::from(held.knobs.mem_mib);
            self.held_cpu += gpu_s * f64::from(held.knobs.cpu_milli);
        } else {
            live.waited = live.waited + span;
        }
    }

    fn take_gpus(&mut self, job: JobIdx, at: Time, gpus: GpuSet, knobs: Knobs) {
        self.count_held(at);
        self.occupancy.enter(&gpus, knobs);
        self.live[job].held = Some(Held { gpus, knobs });
    }

    fn count_held(&mut self, at: Time) {
        let span = (at - self.held_since).0;
        self.held_permille_us += u128::from(self.occupancy.permille()) * u128::from(span);
        self.held_since = at;
    }

    fn depart(&mut self, job: JobIdx, at: Time) {
        self.leave_gpus(job, at);
        if std::mem::take(&mut self.live[job].present) {
            self.present -= 1;
        }
    }

    fn finish(&mut self, job: JobIdx, at: Time) {
        self.depart(job, at);
        if !self.counts(job) {
            return;
        }
        let live = &self.live[job];
        let jct_s = (at - live.submitted).secs();
        self.totals.finished += 1;
        self.last_finish = self.last_finish.max(at);
        self.jcts_s.push(jct_s);
        if live.deadline.is_some() {
            self.jcts_deadline_s.push(jct_s);
            self.kept += live.deadline_value(at);
        }
        if live.best_effort {
            self.jcts_best_effort_s.push(jct_s);
        }
        self.queues_s.push(live.waited.secs());
        if let (Some(alone_s), true) = (live.alone_s, jct_s > 0.0) {
            let crowd = (self.crowd - live.crowd) / jct_s;
            let part = (f64::from(live.gpus) * crowd / f64::from(self.gpus)).max(1.0);
            self.rhos.push(jct_s / (alone_s * part));
            self.paces.push(alone_s / jct_s);
            if alone_s > 0.0 {
                self.stretches[usize::from(live.best_effort)].push(live.ran.secs() / alone_s);
            }
        }
        if let Some(stages) = live.stages_gpu_s {
            let sums = self.stages_gpu_s.get_or_insert([0.0; STAGES.len()]);
            sums.iter_mut().zip(stages).for_each(|(sum, s)| *sum += s);
        }
        if live.deadline.is_some_and(|d| at > d) {
            self.totals.deadline_misses += 1;
        }
    }

    /// A job that ends without finishing misses its deadline.
    fn give_up(&mut self, job: JobIdx, at: Time) {
        self.depart(job, at);
        if self.counts(job) && self.live[job].deadline.is_some() {
            self.totals.deadline_misses += 1;
        }
    }

    fn fact(&mut self, at: Time, fact: &Event) {
        match *fact {
            Event::Submitted(job) if self.live[job].service.is_some() => {
                let live = &mut self.live[job];
                (live.submitted, live.since) = (at, at);
            }
            // It was withdrawn: it waits since it left.
            Event::Submitted(job) if self.live[job].present => {}
            Event::Submitted(job) => {
                self.present += 1;
                let counts = self.counts(job);
                self.totals.jobs += u64::from(counts);
                let crowd = self.crowd;
                let live = &mut self.live[job];
                (live.submitted, live.since, live.crowd, live.present) = (at, at, crowd, true);
                self.totals.deadline_jobs += u64::from(counts && live.deadline.is_some());
            }
            // A service that its user ended had no work to finish.
            Event::Finished(job) if self.live[job].service.is_some() => {
                self.depart(job, at);
            }
            Event::Finished(job) => self.finish(job, at),
            Event::Cancelled(job) => self.give_up(job, at),
            Event::Withdrawn(job) => self.leave_gpus(job, at),
            Event::Failed { job, .. } => {
                self.totals.failures += 1;
                self.leave_gpus(job, at);
            }
            Event::Served { job, served } => {
                let live = &mut self.live[job];
                if let Some((_, sum)) = live.service.as_deref_mut() {
                    *sum = sum.and(served);
                }
                if live.slo_us.is_some() {
                    self.totals.slo_windows += u64::from(served.windows);
                    self.totals.slo_misses += u64::from(served.over);
                }
            }
            Event::Sampled { .. } | Event::Noted { .. } => {}
            Event::Held { .. } | Event::Resized { .. } => {}
            Event::Started(_) | Event::Stopped { .. } | Event::Tuned(_) => {}
            Event::NodeUp(_) | Event::NodeDown(_) | Event::NodeRoom { .. } => {}
        }
    }

    fn action(&mut self, at: Time, action: &Action) {
        match action {
            Action::Start(job, p) | Action::Move(job, p) => {
                self.totals.moves += u64::from(matches!(action, Action::Move(..)));
                self.leave_gpus(*job, at);
                self.take_gpus(*job, at, p.gpus.clone(), p.knobs);
            }
            Action::Tune(job, knobs) => {
                let held = self.live[*job].held.clone();
                self.leave_gpus(*job, at);
                if let Some(held) = held {
                    self.take_gpus(*job, at, held.gpus, *knobs);
                }
            }
            Action::Stop(job) | Action::Suspend(job) => {
                self.totals.preemptions += 1;
                self.leave_gpus(*job, at);
            }
            Action::Reject(job, _) => {
                self.totals.rejected += 1;
                self.give_up(*job, at);
            }
        }
    }
}

impl Observer for Fold {
    fn head(&mut self, head: &Head) {
        self.gpus = head.cluster.gpus();
        for group in &head.cluster.groups {
            let gpu_model = &head.cluster.gpu_models[usize::from(group.gpu_model)];
            let nodes = f64::from(group.count);
            self.mem_mib += nodes * f64::from(group.gpus) * f64::from(gpu_model.mem_mib);
            self.cpu_milli += nodes * f64::from(group.cpu_milli);
        }
    }

    fn profile(&mut self, line: &ProfileLine) {
        let Profile { step_s, step_unknown, stages_s, .. } = line.profile;
        self.profiles.push(((!step_unknown).then_some(step_s), stages_s));
    }

    fn job(&mut self, line: &JobLine) {
        let spec = &line.spec;
        let (step_s, stages_s) = self.profiles[spec.profile];
        let gpus = f64::from(spec.gpus);
        self.live.push(Live {
            gpus: spec.gpus,
            // Of steps of unknown length, the seconds that were declared.
            alone_s: spec.work.and_then(|w| match step_s {
                Some(step_s) => Some(w * step_s),
                None => spec.declared_s.map(Number::get),
            }),
            stages_gpu_s: spec.work.zip(stages_s).map(|(w, s)| s.map(|v| v * w * gpus)),
            deadline: spec.deadline,
            deadline_values: spec.deadline_values.clone(),
            slo_us: spec.slo.map(|s| s.p99_us),
            best_effort: spec.class == Class::BestEffort,
            service: (spec.class == Class::Service)
                .then(|| Box::new((line.name.clone(), Served::default()))),
            ..Live::default()
        });
    }

    fn step(&mut self, step: &StepView<'_>) {
        self.crowd += f64::from(self.present) * (step.at - self.last_step).secs();
        self.last_step = step.at;
        self.totals.events += u64::from(step.asked);
        for fact in step.facts {
            self.fact(step.at, fact);
        }
        for note in step.notes.iter().filter(|n| n.reason == crate::reason::Reason::OutOfRetries) {
            self.totals.failed += 1;
            self.give_up(note.job, step.at);
        }
        for action in step.actions {
            self.action(step.at, action);
        }
    }

    fn end(&mut self, at: Time) {
        for job in self.live.indices() {
            if self.live[job].held.is_some() {
                self.leave_gpus(job, at);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::number::Number;
    use crate::testing::TestCase;

    #[test]
    fn figures_of_a_run_that_can_be_checked_by_hand() {
        // One GPU; a runs 0–4, b waits 1–4 and runs 4–6, c is too large and is rejected.
        let m = TestCase::new("fifo", "1x1", "a 0 1 4, b 1 1 2, c 2 3 1").run().metrics();
        assert_eq!((m.jobs, m.finished, m.rejected), (3, 2, 1));
        assert_eq!(m.avg_jct_s, Some(4.5));
        assert_eq!(m.median_jct_s, Some(4.5));
        assert_eq!(m.p99_jct_s, Some(5.0));
        assert_eq!(m.makespan_s, 6.0);
        assert_eq!(m.avg_queue_s, Some(1.5));
        assert_eq!(m.gpu_util, Some(1.0));
        // a shares the system with b for 3 of its 4 seconds: its fair time is 4 × 7/4.
        let rho_a = 4.0 / (4.0 * 7.0 / 4.0);
        let rho_b = 5.0 / (2.0 * 8.0 / 5.0);
        assert!((m.avg_rho.unwrap() - f64::midpoint(rho_a, rho_b)).abs() < 1e-12);
        let (x, y) = (1.0, 0.4);
        assert!((m.jain.unwrap() - (x + y) * (x + y) / (2.0 * (x * x + y * y))).abs() < 1e-12);
    }

    #[test]
    fn deadlines_count_by_their_value() {
        use crate::time::Time;
        let mut case = TestCase::new("fifo", "1x1", "a 0 1 2, b 0 1 2, c 0 1 2");
        let by = |s: f64| Some(Time::from_secs(s));
        case.jobs[0].spec.deadline = by(2.0);
        case.jobs[1].spec.deadline = by(4.0);
        case.jobs[1].spec.deadline_values =
            [(3.0, 10.0), (4.0, 8.0)].map(|(s, v)| (Time::from_secs(s), Number::of(v))).to_vec();
        case.jobs[2].spec.deadline = by(5.0);
        let m = case.run().metrics();
        assert_eq!((m.deadline_misses, m.deadline_jobs), (1, 3));
        assert_eq!(m.deadline_worth, Some(0.6));
        assert_eq!((m.avg_jct_deadline_s, m.avg_jct_best_effort_s), (Some(4.0), None));
    }

    #[test]
    fn preemption_and_waiting_are_counted() {
        let m = TestCase::new("srtf", "1x1", "a 0 1 5, b 1 1 2").run().metrics();
        assert_eq!(m.preemptions, 1);
        assert_eq!(m.avg_queue_s, Some(1.0));
        assert_eq!(m.gpu_util, Some(1.0));
    }
}
