//! The last minutes of a timeline, and what held before them: what a page needs that opens now.

use roommate_core::idx::JobIdx;
use roommate_core::journal::timeline::{Card, Line, Moment, Start, What};
use std::collections::{BTreeMap, VecDeque};

/// How far back a page can look when it opens, in seconds.
const KEPT_S: f64 = 15.0 * 60.0;
/// Most moments that are kept, whatever their age.
const MOST_MOMENTS: usize = 20_000;

/// What holds of a job before the first moment that is kept.
struct Standing {
    card: Card,
    /// The last moment of each kind that still matters.
    last: BTreeMap<&'static str, Moment>,
    ended: bool,
    /// Moments of this job that are kept.
    kept: usize,
}

/// The last minutes of a timeline.
#[derive(Default)]
pub(crate) struct Recent {
    start: Option<Start>,
    jobs: BTreeMap<JobIdx, Standing>,
    moments: VecDeque<Moment>,
}

impl Recent {
    /// Adds a line; time is that of the line.
    pub(crate) fn add(&mut self, line: Line) {
        match line {
            Line::Head(start) => *self = Self { start: Some(start), ..Self::default() },
            Line::Job(card) => {
                let (last, ended, kept) = (BTreeMap::new(), false, 0);
                self.jobs.insert(card.job, Standing { card, last, ended, kept });
            }
            Line::Moment(moment) => {
                if let Some(job) = self.jobs.get_mut(&moment.job) {
                    job.kept += 1;
                }
                self.moments.push_back(moment);
            }
            Line::End { .. } => {}
        }
    }

    /// Drops what is older than a page shows.
    pub(crate) fn forget(&mut self, now_s: f64) {
        let old = |m: &Moment| m.at_s < now_s - KEPT_S;
        while self.moments.len() > MOST_MOMENTS || self.moments.front().is_some_and(old) {
            let Some(moment) = self.moments.pop_front() else { return };
            let job = moment.job;
            let Some(standing) = self.jobs.get_mut(&job) else { continue };
            standing.kept -= 1;
            standing.take(moment);
            if standing.ended && standing.kept == 0 {
                self.jobs.remove(&job);
            }
        }
    }

    /// The lines of a page that opens now.
    pub(crate) fn lines(&self) -> Vec<Line> {
        let mut lines: Vec<Line> = self.start.iter().cloned().map(Line::Head).collect();
        lines.extend(self.jobs.values().map(|job| Line::Job(job.card.clone())));
        let mut before: Vec<&Moment> = self.jobs.values().flat_map(|j| j.last.values()).collect();
        before.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
        lines.extend(before.into_iter().chain(&self.moments).cloned().map(Line::Moment));
        lines
    }
}

impl Standing {
    fn take(&mut self, moment: Moment) {
        let kind = match moment.what {
            What::Submitted {} => "submitted",
            What::Placed { .. } | What::Tuned { .. } => "placed",
            What::Runs {} => "runs",
            What::Why { .. } | What::Failed { .. } => "why",
            What::Set { .. } => "set",
            What::HeldBack { .. } => "held",
            What::Believed { .. } => "believed",
            What::Sampled { .. } | What::Served { .. } => return,
            What::Leaves { .. } => {
                for kind in ["placed", "runs", "believed"] {
                    self.last.remove(kind);
                }
                return;
            }
            What::Ended { .. } => {
                self.ended = true;
                self.last.clear();
                return;
            }
        };
        let mut moment = moment;
        // Where it runs was said when it was placed.
        if let What::Tuned { knobs } = moment.what
            && let Some(Moment { what: What::Placed { gpus, .. }, .. }) = self.last.get("placed")
        {
            moment.what = What::Placed { gpus: gpus.clone(), knobs };
        }
        self.last.insert(kind, moment);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use roommate_core::idx::GpuIdx;
    use roommate_core::job::Class;
    use roommate_core::knobs::Knobs;

    fn card(job: u32) -> Line {
        Line::Job(Card {
            job: JobIdx(job),
            name: format!("job{job}"),
            class: Class::BestEffort,
            gpus: 1,
            profile: "work".into(),
            work: None,
            slo_ms: None,
            owner: None,
        })
    }

    fn at(at_s: f64, job: u32, what: What) -> Line {
        Line::Moment(Moment { at_s, job: JobIdx(job), what })
    }

    fn knobs(batch: u32) -> Knobs {
        Knobs { batch, ..Knobs::WHOLE }
    }

    #[test]
    fn a_late_page_knows_where_old_jobs_run() {
        let mut recent = Recent::default();
        let placed = What::Placed { gpus: vec![GpuIdx(3)], knobs: knobs(8) };
        for line in [
            card(0),
            card(1),
            at(1.0, 0, placed.clone()),
            at(1.0, 1, placed),
            at(2.0, 0, What::Tuned { knobs: knobs(16) }),
            at(3.0, 1, What::Ended { how: "finished".into() }),
            at(5_000.0, 0, What::Why { why: "alone now".into() }),
        ] {
            recent.add(line);
        }
        recent.forget(5_000.0);
        let now_placed = What::Placed { gpus: vec![GpuIdx(3)], knobs: knobs(16) };
        assert_eq!(
            recent.lines(),
            [
                card(0),
                at(2.0, 0, now_placed),
                at(5_000.0, 0, What::Why { why: "alone now".into() }),
            ]
        );
    }

    #[test]
    fn moments_are_bounded() {
        let mut recent = Recent::default();
        recent.add(card(0));
        for n in 0..MOST_MOMENTS + 500 {
            recent.add(at(n as f64 / 1e6, 0, What::Why { why: n.to_string() }));
        }
        recent.forget(1.0);
        assert_eq!(recent.moments.len(), MOST_MOMENTS);
        // The card, and the last reason before those that are kept.
        assert_eq!(recent.lines().len(), MOST_MOMENTS + 2);
    }
}
