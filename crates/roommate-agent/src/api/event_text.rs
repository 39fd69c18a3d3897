//! Events of a journal as text: one line for each event of a job.

use roommate_core::event::{Action, Event};
use roommate_core::idx::{GpuIdx, IdxVec, JobIdx};
use roommate_core::journal::explain::{by_whom, set_by_user};
use roommate_core::journal::{JobLine, Observer, StepView};
use roommate_core::number::Number;
use roommate_core::reason::Reason;
use roommate_core::time::Time;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// An event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EventLine {
    /// Seconds since the state was begun.
    pub at_s: Number,
    /// Name of the job.
    pub job: String,
    /// The event as text.
    pub what: String,
}

impl std::fmt::Display for EventLine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let at = Time::from_secs(self.at_s.get()).to_string();
        write!(f, "{at:>8}  {}  {}", self.job, self.what)
    }
}

/// An event before it is told: whoever asks may not know the names of all jobs.
struct Entry {
    at: Time,
    /// `None` = the machine.
    job: Option<JobIdx>,
    what: What,
}

enum What {
    /// Text that names no job.
    Words(String),
    Why(Reason),
}

/// Folds a journal into lines of text.
#[derive(Default)]
pub struct EventLog {
    names: IdxVec<JobIdx, String>,
    /// Oldest first.
    entries: VecDeque<Entry>,
    keep: Option<usize>,
}

impl EventLog {
    /// Keeps only the last `keep` lines.
    pub fn last(keep: usize) -> Self {
        Self { keep: Some(keep), ..Self::default() }
    }

    /// All lines, oldest first.
    pub fn all(&self) -> Vec<EventLine> {
        self.lines(&|_| true, &|job| self.names[job].clone())
    }

    /// The lines about these jobs, oldest first, with other jobs called by `name`.
    pub(crate) fn lines(
        &self,
        about: &dyn Fn(Option<JobIdx>) -> bool,
        name: &dyn Fn(JobIdx) -> String,
    ) -> Vec<EventLine> {
        let told = self.entries.iter().filter(|e| about(e.job)).map(|e| EventLine {
            at_s: Number::of(e.at.secs()),
            job: e.job.map_or_else(|| "machine".into(), |job| self.names[job].clone()),
            what: match &e.what {
                What::Words(words) => words.clone(),
                What::Why(reason) => reason.describe(name),
            },
        });
        told.collect()
    }

    fn add(&mut self, at: Time, job: JobIdx, what: impl Into<String>) {
        self.push(at, Some(job), What::Words(what.into()));
    }

    /// Adds something that is not in the journal, about a job or the machine.
    pub(crate) fn notice(&mut self, at: Time, job: Option<JobIdx>, what: String) {
        self.push(at, job, What::Words(what));
    }

    fn push(&mut self, at: Time, job: Option<JobIdx>, what: What) {
        if self.keep.is_some_and(|keep| self.entries.len() >= keep) {
            self.entries.pop_front();
        }
        self.entries.push_back(Entry { at, job, what });
    }

    /// Adds a fact; `by` is the user whose request it was.
    fn fact(&mut self, at: Time, fact: &Event, by: Option<&str>) {
        match fact {
            Event::Submitted(j) => self.add(at, *j, format!("submitted{}", by_whom(by))),
            Event::Started(j) => self.add(at, *j, "runs"),
            Event::Stopped { job, done } => {
                self.add(at, *job, format!("left its devices after {done:.0} steps"));
            }
            Event::Tuned(j) => self.add(at, *j, "runs with its new settings"),
            Event::Finished(j) => self.add(at, *j, "finished"),
            Event::Cancelled(j) => self.add(at, *j, format!("cancelled{}", by_whom(by))),
            Event::Withdrawn(j) => self.add(at, *j, "gone until it is submitted again"),
            Event::Failed { job, reason: why, done } => {
                self.add(at, *job, format!("failed: {why}; {done:.0} steps survive"));
            }
            Event::Noted { job, reason } => self.push(at, Some(*job), What::Why(*reason)),
            Event::Held { job, .. } | Event::Resized { job, .. } => {
                self.add(at, *job, set_by_user(fact, by));
            }
            // Too frequent to list; `ps` shows the latest.
            Event::Sampled { .. } | Event::Served { .. } => {}
            Event::NodeUp(_) | Event::NodeDown(_) | Event::NodeRoom { .. } => {}
        }
    }
}

impl Observer for EventLog {
    fn job(&mut self, line: &JobLine) {
        self.names.push(line.name.clone());
    }

    fn step(&mut self, step: &StepView<'_>) {
        for fact in step.facts {
            self.fact(step.at, fact, step.by);
        }
        for note in step.notes {
            self.push(step.at, Some(note.job), What::Why(note.reason));
        }
        for action in step.actions {
            let what = match action {
                Action::Start(_, p) => format!("to start on {}", devices(&p.gpus)),
                Action::Move(_, p) => format!("to move to {}", devices(&p.gpus)),
                Action::Suspend(_) => "to be suspended".into(),
                Action::Stop(_) => "to be stopped".into(),
                Action::Tune(_, k) => {
                    format!("to run with {}", serde_json::to_string(k).unwrap_or_default())
                }
                Action::Reject(_, why) => format!("rejected: {why}"),
            };
            self.add(step.at, action.job(), what);
        }
    }
}

fn devices(gpus: &[GpuIdx]) -> String {
    let numbers: Vec<String> = gpus.iter().map(|g| g.0.to_string()).collect();
    format!("device {}", numbers.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;
    use roommate_core::idx::ProfileIdx;
    use roommate_core::job::Spec;
    use roommate_core::reason::Note;

    #[test]
    fn jobs_of_others_are_neither_listed_nor_named() {
        let mut log = EventLog::last(3);
        for (n, name) in ["mine", "theirs"].into_iter().enumerate() {
            let spec = Spec::training(1, 1.0, ProfileIdx(0));
            log.job(&JobLine::new(JobIdx(n as u32), name.into(), spec));
        }
        let facts = [Event::Submitted(JobIdx(0)), Event::Submitted(JobIdx(1))];
        let notes = [Note { job: JobIdx(0), reason: Reason::Behind(JobIdx(1)) }];
        let (at, by) = (Time::ZERO, Some("alice"));
        log.step(&StepView { at, facts: &facts, actions: &[], notes: &notes, asked: true, by });
        let told = |lines: Vec<EventLine>| -> Vec<String> {
            lines.into_iter().map(|l| format!("{} {}", l.job, l.what)).collect()
        };
        assert_eq!(
            told(log.all())[1..],
            [
                "theirs submitted by alice",
                "mine waits behind job theirs: this policy does not backfill",
            ]
        );
        let lines = log.lines(&|j| j == Some(JobIdx(0)), &|_| "of another user".into());
        assert_eq!(
            told(lines),
            [
                "mine submitted by alice",
                "mine waits behind job of another user: this policy does not backfill",
            ]
        );
    }
}
