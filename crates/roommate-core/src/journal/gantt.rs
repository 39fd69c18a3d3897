//! Stays: which job was on which GPU from when to when, folded from a journal; and an ASCII chart.

use crate::event::{Action, Event};
use crate::idx::{GpuIdx, GpuSet, Idx, IdxVec, JobIdx};
use crate::journal::{Head, JobLine, Observer, StepView};
use crate::knobs::Knobs;
use crate::time::Time;

/// A period during which a job held the same GPUs.
#[derive(Clone, Debug, PartialEq)]
pub struct Stay {
    /// The job.
    pub job: JobIdx,
    /// Its GPUs.
    pub gpus: GpuSet,
    /// Its knobs during that period.
    pub knobs: Knobs,
    /// Beginning of the period.
    pub from: Time,
    /// End of the period.
    pub to: Time,
}

/// Folds a journal into stays.
#[derive(Debug, Default)]
pub struct Stays {
    /// Stays that have ended, in order of their end.
    pub ended: Vec<Stay>,
    open: IdxVec<JobIdx, Option<(GpuSet, Knobs, Time)>>,
}

impl Stays {
    fn close(&mut self, job: JobIdx, at: Time) {
        if let Some((gpus, knobs, from)) = self.open[job].take()
            && at > from
        {
            self.ended.push(Stay { job, gpus, knobs, from, to: at });
        }
    }
}

impl Observer for Stays {
    fn job(&mut self, _: &JobLine) {
        self.open.push(None);
    }

    fn step(&mut self, step: &StepView<'_>) {
        for fact in step.facts {
            match fact {
                Event::Finished(job) | Event::Cancelled(job) | Event::Withdrawn(job) => {
                    self.close(*job, step.at);
                }
                Event::Failed { job, .. } => self.close(*job, step.at),
                _ => {}
            }
        }
        for action in step.actions {
            match action {
                Action::Stop(job) | Action::Suspend(job) | Action::Reject(job, _) => {
                    self.close(*job, step.at);
                }
                Action::Start(job, p) | Action::Move(job, p) => {
                    self.close(*job, step.at);
                    self.open[*job] = Some((p.gpus.clone(), p.knobs, step.at));
                }
                Action::Tune(job, knobs) => {
                    let gpus = self.open[*job].as_ref().map(|o| o.0.clone());
                    self.close(*job, step.at);
                    self.open[*job] = gpus.map(|g| (g, *knobs, step.at));
                }
            }
        }
    }

    fn end(&mut self, at: Time) {
        for job in self.open.indices() {
            self.close(job, at);
        }
    }
}

/// An ASCII Gantt chart: a row per GPU, a letter per job, a column per interval of time.
#[derive(Debug, Default)]
pub struct Gantt {
    stays: Stays,
    gpus: u32,
}

impl Observer for Gantt {
    fn head(&mut self, head: &Head) {
        self.gpus = head.cluster.gpus();
    }
    fn job(&mut self, line: &JobLine) {
        self.stays.job(line);
    }
    fn step(&mut self, step: &StepView<'_>) {
        self.stays.step(step);
    }
    fn end(&mut self, at: Time) {
        self.stays.end(at);
    }
}

impl Gantt {
    /// The chart, at most `columns` wide and `rows` high. A column shows the job that held the GPU
    /// longest, `.` where it was idle, `#` where several jobs shared it.
    pub fn chart(&self, columns: usize, rows: usize) -> String {
        let end = self.stays.ended.iter().map(|s| s.to.0).max().unwrap_or(0);
        // Round the width of a column up to a whole number of seconds where that still fits.
        let column_us = end.div_ceil(columns.max(1) as u64).next_multiple_of(1_000_000).max(1);
        let width = end.div_ceil(column_us) as usize;
        let rows = (self.gpus as usize).min(rows);
        let mut held: IdxVec<GpuIdx, _> = vec![vec![Cell::default(); width]; rows].into();
        for stay in &self.stays.ended {
            for gpu in &stay.gpus {
                let Some(row) = held.get_mut(*gpu) else { continue };
                let (first, last) = (stay.from.0 / column_us, (stay.to.0 - 1) / column_us);
                for c in first..=last {
                    let from = stay.from.0.max(c * column_us);
                    let to = stay.to.0.min((c + 1) * column_us);
                    row[c as usize].hold(stay.job, to - from);
                }
            }
        }
        let label = format!("gpu{}", rows.saturating_sub(1)).len();
        let mut text = String::new();
        for (gpu, row) in held.iter_enumerated() {
            let cells: String = row.iter().map(Cell::letter).collect();
            let line = format!("{:label$}  {}", format!("gpu{gpu}"), cells.trim_end_matches('.'));
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

#[derive(Clone, Debug, Default)]
struct Cell {
    holder: Option<(JobIdx, u64)>,
    total_us: u64,
    shared: bool,
}

impl Cell {
    fn hold(&mut self, job: JobIdx, us: u64) {
        // Two jobs that hold the cell for its whole length share it; consecutive jobs do not.
        self.shared |= self.holder.is_some_and(|(_, most)| most == us && self.total_us >= us);
        self.total_us += us;
        if self.holder.is_none_or(|(_, most)| us > most) {
            self.holder = Some((job, us));
        }
    }

    fn letter(&self) -> char {
        const LETTERS: &[u8] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
        match self.holder {
            None => '.',
            Some(_) if self.shared => '#',
            Some((job, _)) => char::from(LETTERS[job.usize() % LETTERS.len()]),
        }
    }
}
