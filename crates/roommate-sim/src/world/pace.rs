//! How fast jobs really are: alone, beside roommates, held back by throttles, at another batch size.

use super::{Alarm, LOOKS, STANDSTILL_S, World};
use roommate_core::event::{Event, Sample};
use roommate_core::idx::JobIdx;
use roommate_core::performance::goodput::{Noise, Training};
use roommate_core::performance::progress::work_s;
use roommate_core::performance::throttle;
use roommate_core::time::Time;
use std::cmp::Reverse;

impl World {
    /// Where throttles protect somebody: a protected job that begins is measured with the others held,
    /// and an opportunist climbs from standstill.
    pub(super) fn hold_opportunists(&mut self, now: Time, job: JobIdx) {
        let state = self.engine.state();
        if state.protected == 0 {
            return;
        }
        let gpus = self.live[job].gpus.clone();
        let protected = state.job(job).knobs.floor_permille > 0;
        for gpu in gpus.iter().filter(|g| throttle::is_protected(state, **g)) {
            let settled = throttle::settled(&*self.truth, state, *gpu);
            let (span, tenants) = if protected {
                (throttle::hold(state, job, settled), &state.gpu(*gpu).tenants[..])
            } else {
                (throttle::climb(settled), std::slice::from_ref(&job))
            };
            for tenant in tenants.iter().filter(|t| state.job(**t).knobs.floor_permille == 0) {
                let held_until = &mut self.live[*tenant].held_until;
                if now + span > *held_until {
                    *held_until = now + span;
                    self.alarms.push(Reverse((now + span, Alarm::Unthrottle(*tenant))));
                }
                self.dirty.push(*tenant);
            }
        }
    }

    /// Seconds for the work of a step where the job is now: alone, and with whom it is there now.
    pub(super) fn pace(&mut self, now: Time, job: JobIdx) -> (f64, f64) {
        let state = self.engine.state();
        let gpus = &self.live[job].gpus;
        let shares = gpus.iter().any(|g| state.gpu(*g).tenants.len() > 1);
        let (alone, step_s) = self.steps(now, job);
        let worth = self.goodput_factor(job);
        self.live[job].shares = shares;
        (work_s(alone, worth), work_s(step_s, worth))
    }

    /// Seconds of a step where the job is now: alone, and with whom it is there now.
    pub(super) fn steps(&self, now: Time, job: JobIdx) -> (f64, f64) {
        let state = self.engine.state();
        let gpus = &self.live[job].gpus;
        let quiet = state.costs.quiet_start;
        let away = |t: JobIdx| quiet && !self.running.contains(t);
        let held = |t: JobIdx| self.live[t].held_until > now;
        let alone = state.alone_step_s(job, gpus);
        let speed = match self.live[job].slot {
            // Its speed depends on its batch, also alone.
            Some(_) => self.batch_speed(now, job, state.job(job).knobs.batch),
            None => throttle::effective_speed(&*self.truth, state, job, gpus, &held, &away),
        };
        (alone, alone / speed)
    }

    pub(super) fn training(&self, job: JobIdx) -> Option<&Training> {
        self.engine.state().profile(job).training.as_ref()
    }

    /// Steps of its own batch size that a step of the job really counts for.
    pub(super) fn goodput_factor(&self, job: JobIdx) -> f64 {
        let Some(training) = self.training(job) else { return 1.0 };
        training.goodput_factor(self.engine.state().job(job).knobs, self.live[job].noise_scale)
    }

    /// The noise of its gradients where it goes on from.
    pub(super) fn set_noise(&mut self, job: JobIdx) {
        let Some(noise) = self.training(job).map(|t| t.noise) else { return };
        let live = &mut self.live[job];
        let stage = noise.stage(live.meter.done / live.work);
        live.noise_scale = noise.at(stage);
        live.noise_until = noise_until(stage, live.work);
    }

    pub(super) fn next_noise(&mut self, now: Time, job: JobIdx) {
        let Some(noise) = self.training(job).map(|t| t.noise) else { return };
        let live = &mut self.live[job];
        // By the boundary that was reached: the meter may be a rounding error before it.
        let part = live.noise_until / live.work + 0.5 / f64::from(Noise::STAGES);
        let stage = noise.stage(part);
        live.noise_scale = noise.at(stage);
        live.noise_until = noise_until(stage, live.work);
        let (_, pace) = self.pace(now, job);
        self.live[job].meter.set_step(now, pace);
        self.arm_job(job);
        self.report_pace(now, job);
    }

    /// What is measured of a running job now.
    pub(super) fn sample(&self, now: Time, job: JobIdx) -> Sample {
        let Some(training) = self.training(job) else {
            let step_s = self.live[job].meter.step_s.min(STANDSTILL_S);
            return Sample { step_s, ..Sample::default() };
        };
        let batch = training.batch_of(self.engine.state().job(job).knobs);
        Sample {
            step_s: self.steps(now, job).1.min(STANDSTILL_S),
            noise_scale: self.live[job].noise_scale,
            mem_mib: training.mem_mib(batch).unwrap_or(0),
            batch,
            ..Sample::default()
        }
    }

    pub(super) fn report_pace(&mut self, now: Time, job: JobIdx) {
        let sample = self.sample(now, job);
        self.facts.push(Event::Sampled { job, sample });
    }

    /// What counters show of a profile, once.
    pub(super) fn report_counters(&mut self, job: JobIdx) {
        let state = self.engine.state();
        let profile = state.spec(job).profile;
        if self.counted.contains(profile) {
            return;
        }
        if let Some((sm_util, dram_util)) = self.truth.counters(state, job) {
            self.counted.insert(profile);
            let sample = Sample { sm_util, dram_util, ..Sample::default() };
            self.facts.push(Event::Sampled { job, sample });
        }
    }

    pub(super) fn settle_crowded(&mut self, now: Time) {
        let ends_together = self.engine.state().costs.ends_together;
        for _ in 0..LOOKS {
            let mut dirty = std::mem::take(&mut self.dirty);
            self.add_neighbours_of_held_gangs(&mut dirty);
            dirty.sort_unstable();
            dirty.dedup();
            for job in dirty.drain(..) {
                if !self.running.contains(job) {
                    continue;
                }
                let (_, pace) = self.pace(now, job);
                let live = &mut self.live[job];
                let is_through = live.meter.done_at(now) >= live.work;
                let changed = pace != live.meter.step_s || (is_through && ends_together);
                if changed {
                    live.meter.set_step(now, pace);
                    self.arm_job(job);
                }
                // Steps of another batch may be worth just what they take longer.
                if changed || self.training(job).is_some() {
                    self.report_pace(now, job);
                }
                self.serve(now, job);
            }
            // Only a service that is busier or less busy than before crowds others again.
            if self.dirty.is_empty() {
                self.dirty = dirty;
                return;
            }
        }
        self.dirty.clear();
    }

    /// A gang of an opportunist has one pace, so a change on one of its GPUs is felt on all of them.
    pub(super) fn add_neighbours_of_held_gangs(&self, dirty: &mut Vec<JobIdx>) {
        let state = self.engine.state();
        if state.protected == 0 {
            return;
        }
        for i in 0..dirty.len() {
            let gpus = &self.live[dirty[i]].gpus;
            if gpus.len() > 1 && gpus.iter().any(|g| throttle::is_protected(state, *g)) {
                dirty.extend(gpus.iter().flat_map(|g| &state.gpu(*g).tenants));
            }
        }
    }
}

/// Steps of a job with so much work at which a stage of its noise ends.
fn noise_until(stage: u32, work: f64) -> f64 {
    if stage + 1 >= Noise::STAGES {
        return f64::INFINITY;
    }
    work * f64::from(stage + 1) / f64::from(Noise::STAGES)
}
