//! From a journal to the view of a run in the HTML report.

use crate::report::{RunView, ServiceView, Stay, Stretch};
use roommate_core::event::{Action, Event};
use roommate_core::idx::{IdxVec, JobIdx, TeamIdx};
use roommate_core::journal::gantt::Stays;
use roommate_core::journal::metrics::{Fold, ServiceFigures};
use roommate_core::journal::{Head, JobLine, Observer, StepView, TeamLine};
use roommate_core::time::Time;
use std::collections::BTreeMap;

/// Folds a journal into a view of the run.
#[derive(Default)]
pub struct View {
    head: Option<Head>,
    fold: Fold,
    stays: Stays,
    names: Vec<String>,
    teams: IdxVec<TeamIdx, String>,
    job_teams: Vec<TeamIdx>,
    waiting: IdxVec<JobIdx, bool>,
    submitted: IdxVec<JobIdx, f64>,
    in_queue: u32,
    queue: Vec<(f64, u32)>,
    busy: Vec<(f64, f64)>,
    /// By job: time of its last report on requests, and all reports.
    served: BTreeMap<JobIdx, (f64, Vec<Stretch>)>,
    end: Time,
}

impl View {
    /// The policy of the run.
    pub fn policy(&self) -> &str {
        self.head.as_ref().map_or("", |h| &h.policy)
    }

    /// The view, after the end of the journal.
    pub fn finish(self, label: &str, source: &str) -> RunView {
        let head = self.head.as_ref();
        let mut nodes = Vec::new();
        let mut first = 0;
        for group in head.iter().flat_map(|h| &h.cluster.groups) {
            for _ in 0..group.count {
                nodes.push((first, u32::from(group.gpus)));
                first += u32::from(group.gpus);
            }
        }
        let stays = self.stays.ended.iter().flat_map(|s| {
            s.gpus.iter().map(|g| Stay {
                job: s.job.0,
                gpu: g.0,
                from_s: s.from.secs(),
                to_s: s.to.secs(),
                sm_permille: s.knobs.sm_permille,
            })
        });
        let metrics = self.fold.metrics();
        let mut served = self.served.into_values().map(|(_, stretches)| stretches);
        let service = |s: &ServiceFigures| ServiceView {
            name: s.name.clone(),
            slo_ms: s.slo_us.map(|us| f64::from(us) / 1e3),
            late: s.served.late as f64 / s.served.requests.max(1) as f64,
            over: f64::from(s.served.over) / f64::from(s.served.windows.max(1)),
            p50_ms: f64::from(s.served.p50_us) / 1e3,
            p99_ms: f64::from(s.served.p99_us) / 1e3,
            worst_ms: f64::from(s.served.worst_us) / 1e3,
            goodput_rps: s.goodput_rps,
            stretches: served.next().unwrap_or_default(),
        };
        let services = metrics.services.iter().map(service).collect();
        let team = |t: &TeamIdx| self.teams.get(*t).cloned().unwrap_or_default();
        RunView {
            policy: head.map(|h| h.policy.clone()).unwrap_or_default(),
            label: label.into(),
            source: source.into(),
            cluster: head.map(|h| h.cluster.to_string()).unwrap_or_default(),
            seed: head.map_or(0, |h| h.seed),
            gpus: first,
            nodes,
            end_s: self.end.secs(),
            figures: metrics.rows(),
            services,
            stays: stays.collect(),
            job_teams: self.job_teams.iter().map(team).collect(),
            job_names: self.names,
            jcts_s: self.fold.jcts_s().to_vec(),
            queue: self.queue,
            busy: self.busy,
        }
    }

    fn wait(&mut self, job: JobIdx, waits: bool) {
        let waited = std::mem::replace(&mut self.waiting[job], waits);
        self.in_queue = self.in_queue + u32::from(waits) - u32::from(waited);
    }
}

impl Observer for View {
    fn head(&mut self, head: &Head) {
        self.head = Some(head.clone());
        self.fold.head(head);
    }

    fn profile(&mut self, line: &roommate_core::journal::ProfileLine) {
        self.fold.profile(line);
    }

    fn team(&mut self, line: &TeamLine) {
        self.teams.push(line.name.clone());
    }

    fn job(&mut self, line: &JobLine) {
        self.names.push(line.name.clone());
        self.job_teams.push(line.spec.team);
        self.waiting.push(false);
        self.submitted.push(0.0);
        self.fold.job(line);
        self.stays.job(line);
    }

    fn step(&mut self, step: &StepView<'_>) {
        self.fold.step(step);
        self.stays.step(step);
        for fact in step.facts {
            match fact {
                Event::Submitted(job) => {
                    self.submitted[*job] = step.at.secs();
                    self.wait(*job, true);
                }
                Event::Failed { job, .. } => self.wait(*job, true),
                Event::Finished(job) | Event::Cancelled(job) | Event::Withdrawn(job) => {
                    self.wait(*job, false);
                }
                Event::Served { job, served } if served.windows > 0 => {
                    let at = step.at.secs();
                    let first_s = at.min(self.submitted[*job]);
                    let (since, reports) = self.served.entry(*job).or_insert((first_s, Vec::new()));
                    reports.push(Stretch {
                        from_s: *since,
                        to_s: at,
                        p99_ms: f64::from(served.p99_us) / 1e3,
                        worst_ms: f64::from(served.worst_us) / 1e3,
                        over: f64::from(served.over) / f64::from(served.windows),
                    });
                    *since = at;
                }
                _ => {}
            }
        }
        for note in
            step.notes.iter().filter(|n| n.reason == roommate_core::reason::Reason::OutOfRetries)
        {
            self.wait(note.job, false);
        }
        for action in step.actions {
            let job = action.job();
            match action {
                Action::Start(..) | Action::Move(..) | Action::Reject(..) => self.wait(job, false),
                Action::Stop(_) | Action::Suspend(_) => self.wait(job, true),
                Action::Tune(..) => {}
            }
        }
        let at = step.at.secs();
        if self.queue.last().is_none_or(|q| q.1 != self.in_queue) {
            self.queue.push((at, self.in_queue));
        }
        let held = self.fold.held_gpus();
        if self.busy.last().is_none_or(|b| b.1 != held) {
            self.busy.push((at, held));
        }
    }

    fn end(&mut self, at: Time) {
        self.end = at;
        self.fold.end(at);
        self.stays.end(at);
    }
}
