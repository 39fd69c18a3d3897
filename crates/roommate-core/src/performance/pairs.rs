//! How much kinds of work slow each other on a shared GPU, learned from samples.
//!
//! Each roommate adds a part of its own to the length of a step:
//! step = step alone × (1 + Σ extra[job, roommate]). A sample of a job with one roommate gives the
//! extra of that pair; of one with several roommates, what is left after the known pairs is divided
//! among the unknown ones. Learned when a sample arrives, with the roommates of that moment.
//!
//! Where the length of a step alone was itself measured, samples scatter: extras are then means of
//! samples, and of rooms of known pairs only errors that are no noise count. Where it is only
//! provisional ([`crate::performance::solo`]), nothing is learned. Kept by kind of work: profiles
//! of a kind differ in the length of their steps, to which extras are relative.

use crate::event::Sample;
use crate::idx::{JobIdx, ProfileIdx};
use crate::interference::table::Table;
use crate::job::{Class, Phase};
use crate::knobs::Knobs;
use crate::performance::goodput;
use crate::performance::slowdown_line::{SlowdownLine, Use};
use crate::performance::solo::{Average, Belief};
use crate::reason::Source;
use crate::state::State;
use serde::Serialize;
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// Largest extra: a step that takes 21 times as long tells no more than that.
const MOST: f64 = 20.0;
/// Weight of a new sample of a pair that was measured before, where samples do not scatter.
const RATE: f64 = 0.5;
/// An error below this is taken for noise.
const NOISE: f64 = 0.01;
/// Where samples scatter, an error below so many standard errors is.
const NOISE_ERRORS: f64 = 2.0;

/// What a job of one kind of work suffers beside one of another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Extra {
    /// Length of a step relative to alone, minus 1.
    pub mean: f64,
    /// Number of samples.
    pub samples: u32,
}

/// What was measured of kinds of work that share a GPU.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pairs {
    /// By GPU model, the kind that suffers, and its roommate's.
    extras: BTreeMap<(u8, ProfileIdx, ProfileIdx), Extra>,
    /// Given in advance, by profile: counts until a sample says otherwise.
    given: Option<Table>,
    /// For pairs that were not measured.
    line: SlowdownLine,
    /// Grows with every change.
    version: u64,
}

impl Pairs {
    /// Pairs whose speeds are given in advance.
    pub fn of_table(given: Option<Table>) -> Self {
        Self { given, ..Self::default() }
    }

    /// What a job of kind `own` was measured to suffer beside one of `other`.
    pub fn measured(&self, gpu_model: u8, own: ProfileIdx, other: ProfileIdx) -> Option<Extra> {
        self.extras.get(&(gpu_model, own, other)).copied()
    }

    /// What is expected of a pair that was not measured, from what both use of a GPU.
    pub fn predicted(&self, own: Use, other: Use) -> f64 {
        self.line.predict(products(own, other)).clamp(0.0, MOST)
    }

    /// Everything that was measured: GPU model, the profile that suffers, its roommate's, how much.
    pub fn iter(&self) -> impl Iterator<Item = (u8, ProfileIdx, ProfileIdx, Extra)> {
        self.extras
            .iter()
            .map(|((gpu_model, own, other), extra)| (*gpu_model, *own, *other, *extra))
    }

    /// Takes over what was measured in an earlier run.
    pub(crate) fn seed(&mut self, gpu_model: u8, own: ProfileIdx, other: ProfileIdx, extra: Extra) {
        let mean = extra.mean.clamp(0.0, MOST);
        self.extras.insert((gpu_model, own, other), Extra { mean, ..extra });
        self.version += 1;
    }

    /// What the table given in advance says of profiles.
    fn given(&self, gpu_model: u8, own: ProfileIdx, other: ProfileIdx) -> Option<f64> {
        let speed = self.given.as_ref()?.known_speed(gpu_model, own, other)?;
        Some((1.0 / speed.max(f64::MIN_POSITIVE) - 1.0).clamp(0.0, MOST))
    }

    /// Says that what was predicted has changed.
    pub(crate) fn touch(&mut self) {
        self.version += 1;
    }

    /// A number that changes whenever something was learned.
    pub fn version(&self) -> u64 {
        self.version
    }
}

fn products(own: Use, other: Use) -> Use {
    [own[0] * other[0], own[1] * other[1]]
}

/// Busy shares that are assumed of a profile of which nothing is known.
const USUAL: Use = [0.5; 2];

/// What a job of profile `own` is expected to suffer beside one of `other`.
pub fn extra(state: &State, gpu_model: u8, own: ProfileIdx, other: ProfileIdx) -> f64 {
    let uses = |profile| state.demand(profile).unwrap_or(USUAL);
    let known = known(state, gpu_model, own, other);
    known.unwrap_or_else(|| state.pairs.predicted(uses(own), uses(other)))
}

/// How much longer a step takes than alone.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Slowdown {
    /// 1 = as long as alone.
    pub times: f64,
    /// How that is known.
    pub source: Source,
}

impl Slowdown {
    /// The same to three decimals, for people.
    #[must_use]
    pub fn rounded(self) -> Self {
        Self { times: (self.times * 1e3).round() / 1e3, ..self }
    }
}

/// How much longer the steps of a job that runs are believed to take than alone, on the GPU where
/// that is worst.
pub fn slowdown(state: &State, job: JobIdx) -> Slowdown {
    let own = state.spec(job).profile;
    let mut worst = Slowdown { times: 1.0, source: Source::Measured };
    for gpu in state.job(job).gpus.iter().map(|g| state.gpu(*g)) {
        let mut here = Slowdown { times: 1.0, source: Source::Measured };
        for other in gpu.tenants.iter().filter(|t| **t != job) {
            let profile = state.spec(*other).profile;
            let part = weight_of(state.job(job).knobs, state.job(*other).knobs);
            here.times += part * extra(state, gpu.gpu_model, own, profile);
            let (kind, of) = (state.kind(own), state.kind(profile));
            let source = match state.pairs.measured(gpu.gpu_model, kind, of) {
                Some(_) => Source::Measured,
                None if state.demand(own).and(state.demand(profile)).is_some() => Source::Learnt,
                None => Source::Thumb,
            };
            here.source = here.source.min(source);
        }
        if here.times > worst.times || here.source < worst.source {
            worst = Slowdown { times: worst.times.max(here.times), ..here };
        }
    }
    worst
}

/// The length of a step that was measured relative to alone; none for a service, with another batch
/// size, and where the length alone is not known.
pub fn measured_slowdown(state: &State, job: JobIdx, step_s: f64) -> Option<f64> {
    let hot = state.job(job);
    let is_own_batch = goodput::is_own_batch(state, job, hot.knobs) && hot.user.batch == 0;
    if state.spec(job).class == Class::Service || !is_own_batch || hot.gpus.is_empty() {
        return None;
    }
    let is_known = state.belief_on(job, &hot.gpus).is_measured;
    let alone_s = state.alone_step_s(job, &hot.gpus);
    Some(step_s / alone_s).filter(|times| is_known && times.is_finite())
}

/// The same where it was measured or given.
pub fn known(state: &State, gpu_model: u8, own: ProfileIdx, other: ProfileIdx) -> Option<f64> {
    let measured = state.pairs.measured(gpu_model, state.kind(own), state.kind(other));
    // Scatter can make it seem that a job gains by a roommate.
    let measured = measured.map(|extra| extra.mean.max(0.0));
    measured.or_else(|| state.pairs.given(gpu_model, own, other))
}

/// What part of an extra a tenant suffers from a roommate, by what their knobs say. Means of six
/// pairs of training jobs on one H200, with priority and with the other confined to 96 and to 48
/// of the 132 SMs; in between by interpolation.
pub fn weight_of(own: Knobs, other: Knobs) -> f64 {
    let (first, last) = (own.priority && !other.priority, other.priority && !own.priority);
    let part = |knobs: Knobs| f64::from(knobs.sm_most_permille) / f64::from(Knobs::SM_ALL);
    if first {
        return line_between(part(other), [(0.364, 0.19), (0.727, 0.36), (1.0, 0.55)]);
    }
    if last {
        return line_between(part(own), [(0.364, 4.8), (0.727, 2.3), (1.0, 1.55)]);
    }
    // Confined roommates disturb in proportion to what they may use.
    part(other).min(1.0)
}

/// The value at `x` of the line through three points, constant beyond them.
fn line_between(x: f64, points: [(f64, f64); 3]) -> f64 {
    let [first, .., last] = points;
    if x <= first.0 {
        return first.1;
    }
    let pair = points.windows(2).find(|p| x <= p[1].0);
    pair.map_or(last.1, |p| p[0].1 + (p[1].1 - p[0].1) * (x - p[0].0) / (p[1].0 - p[0].0))
}

/// The tenants of a GPU as one of them has them.
pub(super) struct Room {
    gpu_model: u8,
    /// Profiles of its roommates, and what part of an extra their knobs make of it.
    others: SmallVec<[(ProfileIdx, f64); 4]>,
    /// What they are believed to cost it together.
    pub(super) extra: f64,
}

/// The room of a job that is believed to be the worst: it sets the pace of a gang.
pub(super) fn worst_room(state: &State, job: JobIdx) -> Option<Room> {
    let own = state.spec(job).profile;
    let mut worst: Option<Room> = None;
    for gpu in state.job(job).gpus.iter().map(|g| state.gpu(*g)) {
        let others = gpu.tenants.iter().filter(|t| **t != job && disturbs(state, **t));
        let weight = |t: &JobIdx| weight_of(state.job(job).knobs, state.job(*t).knobs);
        let others: SmallVec<[(ProfileIdx, f64); 4]> =
            others.map(|t| (state.spec(*t).profile, weight(t))).collect();
        let extra = others.iter().map(|(o, w)| w * extra(state, gpu.gpu_model, own, *o)).sum();
        if worst.as_ref().is_none_or(|w| extra > w.extra) {
            worst = Some(Room { gpu_model: gpu.gpu_model, others, extra });
        }
    }
    worst
}

/// Whether a job has roommates that disturb it now.
pub(super) fn has_roommates(state: &State, job: JobIdx) -> bool {
    let mut tenants = state.job(job).gpus.iter().flat_map(|g| &state.gpu(*g).tenants);
    tenants.any(|t| *t != job && disturbs(state, *t))
}

/// Takes in a sample of a job that shares GPUs.
pub fn learn(state: &mut State, job: JobIdx, sample: &Sample) {
    let hot = state.job(job);
    let own_batch = goodput::is_own_batch(state, job, hot.knobs);
    if state.spec(job).class == Class::Service || !own_batch || !hot.knobs.is_plain() {
        return;
    }
    let belief = state.belief_on(job, &hot.gpus);
    let alone_s = state.alone_step_s(job, &hot.gpus);
    let least = -NOISE_ERRORS * belief.scatter;
    let found = (sample.step_s.get() / alone_s - 1.0).clamp(least, MOST);
    if !belief.is_measured || !found.is_finite() {
        return;
    }
    let Some(room) = worst_room(state, job).filter(|room| !room.others.is_empty()) else { return };
    let own = state.spec(job).profile;
    if !attribute(state, own, &room, found, belief) {
        return;
    }
    if let [(other, part)] = room.others[..] {
        let uses = |profile| state.demand(profile).unwrap_or(USUAL);
        let inputs = products(uses(own), uses(other));
        state.pairs.line.learn(inputs, (found / part).clamp(0.0, MOST / 2.0));
    }
    state.pairs.touch();
}

/// Divides what a job was found to suffer among its roommates; whether it says anything new.
fn attribute(state: &mut State, own: ProfileIdx, room: &Room, found: f64, belief: Belief) -> bool {
    let Room { gpu_model, others, extra: believed } = room;
    let is_new = |o: &ProfileIdx| known(state, *gpu_model, own, *o).is_none();
    let any_new = others.iter().any(|(o, _)| is_new(o));
    let error = found - believed;
    if is_noise(error, found, others.len() > 1 && !any_new, belief) {
        return false;
    }
    let targets = others.iter().filter(|(o, _)| !any_new || is_new(o));
    let parts: f64 = targets.clone().map(|(_, part)| part).sum();
    let targets: SmallVec<[(ProfileIdx, f64); 4]> =
        targets.map(|(o, _)| (state.kind(*o), extra(state, *gpu_model, own, *o))).collect();
    let part = error / parts.max(f64::MIN_POSITIVE);
    let least = -NOISE_ERRORS * belief.scatter;
    let own = state.kind(own);
    for (other, old) in targets {
        let now = (old + part).clamp(least, MOST);
        let entry = state.pairs.extras.entry((*gpu_model, own, other));
        let extra = entry.or_insert(Extra { mean: now, samples: 0 });
        extra.mean += weight(extra.samples, belief) * (now - extra.mean);
        extra.samples = extra.samples.saturating_add(1);
    }
    true
}

/// Whether an error of what is believed of a room is no more than samples scatter. Of a pair that
/// scatters every sample counts, as part of a mean; of rooms of `several` known pairs it is not
/// known which of them is wrong.
fn is_noise(error: f64, found: f64, several: bool, belief: Belief) -> bool {
    if belief.scatter == 0.0 {
        return error.abs() < NOISE;
    }
    let standard_error = (1.0 + found.max(0.0)) * belief.scatter.hypot(belief.error);
    several && error.abs() < NOISE_ERRORS * standard_error
}

/// Weight of a sample of a pair after so many.
fn weight(samples: u32, belief: Belief) -> f64 {
    match samples {
        0 => 1.0,
        _ if belief.scatter == 0.0 => RATE,
        n => Average::weight(n),
    }
}

/// Whether a tenant disturbs others now: in worlds with quiet starts, only once it runs.
fn disturbs(state: &State, tenant: JobIdx) -> bool {
    !state.costs.quiet_start || state.job(tenant).phase == Phase::Running
}

#[cfg(test)]
mod tests;
