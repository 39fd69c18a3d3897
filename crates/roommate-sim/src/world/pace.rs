//! True step times: alone, beside co-located jobs, under throttles, at another batch size.

use super::{Alarm, LOOKS, STANDSTILL_S, World};
use roommate_core::event::{Event, Sample};
use roommate_core::idx::JobIdx;
use roommate_core::number::{Number, Number32};
use roommate_core::performance::effective_speed::effective_speed;
use roommate_core::performance::goodput::{Noise, Training};
use roommate_core::performance::progress::work_s;
use roommate_core::performance::throttle;
use roommate_core::time::Time;
use std::cmp::Reverse;

impl World {
    /// Throttles opportunists on protected GPUs: while a protected job starts, they are held so
    /// that its undisturbed speed can be measured; an opportunist that starts climbs from
    /// standstill.
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
                (throttle::hold(self.true_step_s(job), settled), &state.gpu(*gpu).tenants[..])
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

    /// Seconds per step of work on the job's present GPUs: alone, and beside its co-located jobs.
    pub(super) fn pace(&mut self, now: Time, job: JobIdx) -> (f64, f64) {
        let state = self.engine.state();
        let gpus = &self.live[job].gpus;
        let shares = gpus.iter().any(|g| state.gpu(*g).tenants.len() > 1);
        let (alone, step_s) = self.steps(now, job);
        let worth = self.goodput_factor(job);
        self.live[job].shares = shares;
        (work_s(alone, worth), work_s(step_s, worth))
    }

    /// Step time in seconds on the job's present GPUs: alone, and beside its co-located jobs.
    pub(super) fn steps(&self, now: Time, job: JobIdx) -> (f64, f64) {
        let state = self.engine.state();
        let gpus = &self.live[job].gpus;
        let quiet = state.costs.quiet_start;
        let away = |t: JobIdx| quiet && !self.running.contains(t);
        let held = |t: JobIdx| self.live[t].held_until > now;
        let alone = self.true_step_s(job);
        let speed = if self.live[job].slot.is_some() {
            // The speed of a service depends on its batch size even when it is alone.
            self.batch_speed(now, job, state.job(job).knobs.batch)
        } else {
            let beside = effective_speed(&*self.truth, state, job, gpus, &held, &away);
            beside * self.open_share(job)
        };
        (alone, alone / speed)
    }

    pub(super) fn training(&self, job: JobIdx) -> Option<&Training> {
        self.engine.state().profile(job).training.as_ref()
    }

    /// Number of steps of the job's own batch size that one step is worth now.
    pub(super) fn goodput_factor(&self, job: JobIdx) -> f64 {
        let Some(training) = self.training(job) else { return 1.0 };
        training.goodput_factor(self.engine.state().job(job).knobs, self.live[job].noise_scale)
    }

    /// Sets the gradient noise scale for the work the job has done.
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
        // Taken from the boundary that was reached: the meter may be a rounding error short of it.
        let part = live.noise_until / live.work + 0.5 / f64::from(Noise::STAGES);
        let stage = noise.stage(part);
        live.noise_scale = noise.at(stage);
        live.noise_until = noise_until(stage, live.work);
        let (_, pace) = self.pace(now, job);
        self.live[job].meter.set_step(now, pace);
        self.arm_job(job);
        self.report_pace(now, job);
    }

    /// The sample that a running job reports now.
    pub(super) fn sample(&mut self, now: Time, job: JobIdx) -> Sample {
        let has_training = self.training(job).is_some();
        let step_s =
            if has_training { self.steps(now, job).1 } else { self.live[job].meter.step_s };
        let step_s = Number::of(self.scattered_s(job, step_s).min(STANDSTILL_S));
        let Some(training) = self.training(job) else {
            return Sample { step_s, ..Sample::default() };
        };
        let batch = training.batch_of(self.engine.state().job(job).knobs);
        Sample {
            step_s,
            noise_scale: Number32::of(self.live[job].noise_scale),
            mem_mib: training.mem_mib(batch).unwrap_or(0),
            batch,
            ..Sample::default()
        }
    }

    /// Reports a change of pace at once; in a blind run the job is measured later.
    pub(super) fn report_pace(&mut self, now: Time, job: JobIdx) {
        if self.is_blind(job) {
            return;
        }
        let sample = self.sample(now, job);
        self.facts.push(Event::Sampled { job, sample });
    }

    /// Reports the hardware counters of a job's profile, once per profile.
    pub(super) fn report_counters(&mut self, job: JobIdx) {
        let state = self.engine.state();
        let profile = state.spec(job).profile;
        let unseen = self.is_blind(job) && !state.is_alone(job);
        if self.counted.contains(profile) || unseen {
            return;
        }
        if let Some((sm_util, dram_util)) = self.truth.counters(state, job) {
            self.counted.insert(profile);
            let [sm_util, dram_util] = [sm_util, dram_util].map(Number32::of);
            let sample = Sample { sm_util, dram_util, ..Sample::default() };
            self.facts.push(Event::Sampled { job, sample });
        }
    }

    pub(super) fn settle_crowded(&mut self, now: Time) {
        let ends_together = self.engine.state().costs.quirks.ends_together;
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
                // At another batch size the step time may change while the time per work does not.
                if changed || self.training(job).is_some() {
                    self.report_pace(now, job);
                }
                self.serve(now, job);
            }
            // Only a service whose load changed marks further jobs.
            if self.dirty.is_empty() {
                self.dirty = dirty;
                return;
            }
        }
        self.dirty.clear();
    }

    /// An opportunist's gang has one step time, so a change on one of its GPUs affects all of them.
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

/// Work (in steps) at which a stage of the gradient noise ends, for a job of `work` steps.
fn noise_until(stage: u32, work: f64) -> f64 {
    if stage + 1 >= Noise::STAGES {
        return f64::INFINITY;
    }
    work * f64::from(stage + 1) / f64::from(Noise::STAGES)
}
