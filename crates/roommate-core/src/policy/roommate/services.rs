//! Training beside services: how far it is held back so that each service keeps its objective.
//!
//! A service has priority. Beyond that there are three levels, climbed one at a time while its
//! measured p99 is above the objective: training beside it is free; it is confined to three
//! quarters of the SMs; it leaves. The way back takes longer after each failure. Within seconds the
//! machine guards an objective by itself (gate, pauses); this is about minutes.

use crate::event::Sample;
use crate::idx::{GpuIdx, JobIdx};
use crate::job::Class;
use crate::state::State;
use crate::time::{Span, Time};
use std::collections::BTreeMap;

/// How long a service has to be well within its objective before training comes nearer, seconds.
const CALM_S: f64 = 60.0;
/// Longest such time, after failures.
const CALM_MOST_S: f64 = 3600.0;
/// Seconds after a change of level in which samples still show the time before it.
const SETTLING_S: f64 = 5.0;
/// A p99 below this part of the objective is well within it.
const WELL_WITHIN: f64 = 0.7;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    Free,
    Confined,
    Alone,
}

impl Level {
    fn stricter(self) -> Self {
        if self == Self::Free { Self::Confined } else { Self::Alone }
    }

    fn freer(self) -> Self {
        if self == Self::Alone { Self::Confined } else { Self::Free }
    }
}

#[derive(Clone, Copy, Debug)]
struct Standing {
    level: Level,
    /// When its p99 was last close to the objective, or its level changed.
    since: Time,
    /// When its level changed last.
    changed: Time,
    /// How long it has to be well within its objective before training comes nearer.
    calm: Span,
}

/// The services that were measured.
#[derive(Default)]
pub(super) struct Services {
    of: BTreeMap<JobIdx, Standing>,
}

impl Services {
    /// Takes in a measurement of a service; whether its level changed.
    pub(super) fn learn(&mut self, state: &State, job: JobIdx, sample: &Sample) -> bool {
        let Some(slo) = state.spec(job).slo.filter(|_| sample.p99_us > 0) else { return false };
        let now = state.now;
        let fresh = Standing {
            level: Level::Free,
            since: now,
            changed: Time::ZERO,
            calm: Span::from_secs(CALM_S),
        };
        let standing = self.of.entry(job).or_insert(fresh);
        let part = f64::from(sample.p99_us) / f64::from(slo.p99_us.max(1));
        if part >= WELL_WITHIN {
            standing.since = now;
        }
        let settled = now - standing.changed >= Span::from_secs(SETTLING_S);
        if part <= 1.0 || !settled || standing.level == Level::Alone {
            return false;
        }
        standing.level = standing.level.stricter();
        standing.changed = now;
        standing.calm = Span::from_secs((2.0 * standing.calm.secs()).min(CALM_MOST_S));
        true
    }

    /// Lets training come nearer to services that have been well within their objective for long
    /// enough; those whose level changed.
    pub(super) fn relax(&mut self, now: Time) -> Vec<JobIdx> {
        let mut changed = Vec::new();
        for (job, standing) in &mut self.of {
            if standing.level > Level::Free && now - standing.since >= standing.calm {
                standing.level = standing.level.freer();
                (standing.since, standing.changed) = (now, now);
                changed.push(*job);
            }
        }
        changed
    }

    /// When training may come nearer to a service next.
    pub(super) fn next_look(&self) -> Option<Time> {
        let held = self.of.values().filter(|s| s.level > Level::Free);
        held.map(|s| s.since + s.calm).min()
    }

    pub(super) fn forget(&mut self, job: JobIdx) {
        self.of.remove(&job);
    }

    fn level_on(&self, state: &State, gpu: GpuIdx) -> Level {
        let level = |t: &JobIdx| self.of.get(t).map(|s| s.level);
        state.gpu(gpu).tenants.iter().filter_map(level).max().unwrap_or(Level::Free)
    }

    /// Whether training on this GPU is confined to a part of the SMs.
    pub(super) fn confine(&self, state: &State, gpu: GpuIdx) -> bool {
        self.level_on(state, gpu) > Level::Free
    }

    /// Whether training has to leave this GPU.
    pub(super) fn want_alone(&self, state: &State, gpu: GpuIdx) -> bool {
        self.level_on(state, gpu) == Level::Alone
    }

    /// Whether the job may share this GPU with the services on it: one service on a GPU, and
    /// training only where the service does not want to be alone.
    pub(super) fn admits(&self, state: &State, gpu: GpuIdx, job: JobIdx) -> bool {
        let serves = |j: &JobIdx| state.spec(*j).class == Class::Service;
        let occupied = state.gpu(gpu).tenants.iter().any(serves);
        !occupied || (!serves(&job) && !self.want_alone(state, gpu))
    }
}
