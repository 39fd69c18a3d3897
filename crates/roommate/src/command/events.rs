//! `roommate events`: the journal of the daemon in words.

use crate::cli::machine::{Events, Listing};
use crate::process;
use roommate_core::event::{Action, Event};
use roommate_core::idx::{Idx, JobIdx};
use roommate_core::journal::{JobLine, Observer, StepView};
use roommate_core::time::Time;
use std::process::ExitCode;
use std::time::Duration;

pub(super) fn run(args: &Events) -> anyhow::Result<ExitCode> {
    let path = super::machine::paths(&args.state).journal();
    super::machine::require_journal(&path)?;
    let mut told = 0;
    loop {
        let lines: Vec<String> = if args.output == Listing::Json {
            let text = super::submit::text_of(&path)?;
            text.split_inclusive('\n').filter(|l| l.ends_with('\n')).map(str::to_string).collect()
        } else {
            let mut words = Words::default();
            super::read_journal(&path, &mut words)?;
            words.lines
        };
        // A new daemon makes the file anew, with the same lines.
        process::print(&lines[told.min(lines.len())..].concat())?;
        told = lines.len();
        if !args.follow {
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(Duration::from_millis(300));
    }
}

/// Folds a journal into a line for everything that happened to a job.
#[derive(Default)]
pub(super) struct Words {
    names: Vec<String>,
    pub(super) lines: Vec<String>,
}

impl Words {
    fn tell(&mut self, at: Time, job: JobIdx, what: &str) {
        let name = &self.names[job.usize()];
        self.lines.push(format!("{:>8}  {name}  {what}\n", at.to_string()));
    }

    fn fact(&mut self, at: Time, fact: &Event) {
        match fact {
            Event::Submitted(j) => self.tell(at, *j, "submitted"),
            Event::Started(j) => self.tell(at, *j, "runs"),
            Event::Stopped { job, done } => {
                self.tell(at, *job, &format!("stands still after {done:.0} steps"));
            }
            Event::Tuned(j) => self.tell(at, *j, "runs with its new settings"),
            Event::Finished(j) => self.tell(at, *j, "finished"),
            Event::Cancelled(j) => self.tell(at, *j, "cancelled"),
            Event::Failed { job, why, done } => {
                self.tell(at, *job, &format!("failed: {why}; {done:.0} steps survive"));
            }
            // Too many to tell, and `ps` shows the last.
            Event::Sampled { .. } | Event::Served { .. } => {}
            Event::NodeUp(_) | Event::NodeDown(_) => {}
        }
    }
}

impl Observer for Words {
    fn job(&mut self, line: &JobLine) {
        self.names.push(line.name.clone());
    }

    fn step(&mut self, step: &StepView<'_>) {
        for fact in step.facts {
            self.fact(step.at, fact);
        }
        for note in step.notes {
            let names = &self.names;
            let what = note.why.tell(&|j| names[j.usize()].clone());
            self.tell(step.at, note.job, &what);
        }
        for action in step.actions {
            let what = match action {
                Action::Start(_, p) => format!("to start on {}", devices(&p.gpus)),
                Action::Move(_, p) => format!("to move to {}", devices(&p.gpus)),
                Action::Suspend(_) => "to wait in memory".into(),
                Action::Stop(_) => "to leave".into(),
                Action::Tune(_, k) => {
                    format!("to run with {}", serde_json::to_string(k).unwrap_or_default())
                }
                Action::Reject(_, why) => format!("rejected: {why}"),
            };
            self.tell(step.at, action.job(), &what);
        }
    }
}

fn devices(gpus: &[roommate_core::idx::GpuIdx]) -> String {
    let numbers: Vec<String> = gpus.iter().map(|g| g.0.to_string()).collect();
    format!("device {}", numbers.join(","))
}
