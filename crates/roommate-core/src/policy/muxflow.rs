//! Services get the share that they use, and training is matched to the rest of each GPU.
//!
//! # Idea
//! Services have priority: the share of a service is its predicted SM utilisation at the measured
//! load, with headroom, and training is suspended at once when an SLO is missed. The rest of a GPU
//! is best used by the training task that is slowed down least there. Several tasks of the queue
//! are therefore matched to GPUs at a time, by predicted speed.
//!
//! # Reads / does / wakes
//! Reads measured load and latency, SLOs, utilisation of profiles (measured, else predicted),
//! profiled batch times of services (at most `profile_points` for each curve), and memory; never
//! durations. Starts one service on a GPU, and training beside it from a window of the oldest
//! tasks. Sets the share of services, never their batch size. Suspends training beside a service
//! that missed its SLO, and places none on that GPU for `cool_s`. Wakes at measurements and when
//! that time ends.
//!
//! # Differs from the paper
//! After `MuxFlow` (Zhao et al., 2023), which protects online services beside offline training in
//! production. Modelled: the share from predicted SM utilisation, eviction on overload, pairing by
//! maximum-weight matching. Not modelled: its deep neural network (a product of utilisations takes
//! its place), the protection of clocks and memory at kernel level, and its handling of faults that
//! MPS clients share. The matching is over a window of `window` tasks and about as many GPUs,
//! because tasks and GPUs become available one by one.

use crate::event::Sample;
use crate::idx::{GpuIdx, GpuSet, IdxVec, JobIdx};
use crate::knobs::Knobs;
use crate::math::matching::{Exact, NONE};
use crate::performance::latency::Axis;
use crate::placement;
use crate::plan::Plan;
use crate::policy::serving::{
    ColocationPolicy, GpuIndex, GpuTenants, LatencyModel, Limits, ServiceColocation, ServiceConfig,
};
use crate::policy::{Fuzz, Policy};
use crate::reason::Reason;
use crate::state::State;
use crate::time::{Span, Time};
use serde::{Deserialize, Serialize};

registry! { "muxflow.rs"
    ("muxflow-like", family: Services, knows_durations: false, preset: r"{}",
        summary: "services get the share that they use, training is matched to the rest",
        paper: "Zhao et al., MuxFlow, 2023", compat: &[])
}

/// Parameters of `muxflow-like`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Params {
    /// Factor between the predicted SM utilisation of a service and its share.
    headroom: f64,
    /// Minimum share of a service.
    least_share: f64,
    /// Seconds for which a GPU takes no training after its service missed its SLO.
    cool_s: f64,
    /// Training tasks that are matched to GPUs at a time.
    window: u8,
    /// Most profiled points used for each curve of a service.
    profile_points: u8,
    /// Maximum training tasks beside a service, 1 to 3.
    max_training: u8,
    /// Minimum share of each training task.
    least_training: f64,
    /// Part of its memory that a training task needs on the GPU; the rest can be on the host.
    min_memory: f64,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            headroom: 1.5,
            least_share: 0.1,
            cool_s: 300.0,
            window: 8,
            profile_points: 6,
            max_training: 3,
            least_training: 0.1,
            min_memory: 0.1,
        }
    }
}

/// Values that the laws try.
fn fuzz(f: &mut Fuzz<'_>) {
    f.range("max_training", 1..=3);
    f.pick("profile_points", &[0, 3, 6]);
    f.pick("min_memory", &[0.0, 0.1, 1.0]);
    f.pick("cool_s", &[0.0, 3.0, 20.0]);
    f.range("window", 1..=5);
}

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    let sane = |v: f64, from: f64| v.is_finite() && (from..=1e6).contains(&v);
    if !sane(params.headroom, 1.0) || !sane(params.cool_s, 0.0) {
        return Err("headroom: expected at least 1; cool_s: seconds".into());
    }
    if !(0.001..=1.0).contains(&params.least_share) || !(1..=32).contains(&params.window) {
        return Err("least_share: expected 0.001 to 1; window: 1 to 32".into());
    }
    let limits = Limits::new(params.max_training, params.least_training, params.min_memory)?;
    let known = LatencyModel::new(Axis::Inverse, params.profile_points);
    let cooling = IdxVec::new();
    Ok(ServiceColocation::new(
        limits,
        MuxFlow { params, limits, known, cooling, matcher: Exact::new() },
    ))
}

struct MuxFlow {
    params: Params,
    limits: Limits,
    known: LatencyModel,
    /// By GPU: the number of the last measurement used, and until when no training is placed.
    cooling: IdxVec<GpuIdx, (u32, Time)>,
    matcher: Exact,
}

impl MuxFlow {
    /// Predicted SM utilisation of a service at this load, with headroom, permille.
    fn busy(&self, state: &State, gpu: GpuIdx, service: JobIdx, load_rps: f64) -> u16 {
        let knobs = state.job(service).knobs;
        let own = state.profile(service).serving.map_or(1, |s| s.batch);
        let batch = if knobs.batch == 0 { own } else { knobs.batch };
        let takes_s = self.known.curve(state, service, gpu, batch).at(1.0);
        let time = (load_rps * takes_s / f64::from(batch)).min(1.0);
        let [sm, _] = self.known.uses(state, state.spec(service).profile);
        let share = (sm * time * self.params.headroom).clamp(self.params.least_share, 1.0);
        (share * 1000.0).round() as u16
    }

    /// Predicted speed of a training task on this GPU.
    fn speed(&self, state: &State, rooms: &GpuIndex, gpu: GpuIdx, job: JobIdx) -> f64 {
        let room = rooms.room(gpu);
        let [sm, dram] = self.known.uses(state, state.spec(job).profile);
        let service = room.service.map_or(0, |s| match room.seen {
            Some(seen) => self.busy(state, gpu, s, seen.load_rps),
            None => Knobs::SM_ALL / 2,
        });
        let left = f64::from(rooms.left_for_each(service, room.training.len() + 1)) / 1000.0;
        let tenants = room.service.iter().chain(&room.training);
        let others: f64 = tenants.map(|t| self.known.uses(state, state.spec(*t).profile)[1]).sum();
        (left / sm.max(0.05)).min(1.0) / (1.0 + dram * others)
    }

    /// Whether the GPU can take the training task and is not cooling down.
    fn is_open(&self, plan: &Plan<'_>, rooms: &GpuIndex, gpu: GpuIdx, job: JobIdx) -> bool {
        let cool = self.cooling.get(gpu).is_none_or(|(_, until)| *until <= plan.now);
        cool && rooms.has_place(plan, gpu, job)
    }
}

impl ColocationPolicy for MuxFlow {
    fn learn(&mut self, state: &State, _: &GpuIndex, _: JobIdx, _: &Sample) {
        self.known.notice(state);
    }

    fn choose(&mut self, plan: &mut Plan<'_>, rooms: &GpuIndex, job: JobIdx) -> Option<GpuIdx> {
        let all = plan.gpus.indices();
        let open = all.filter(|g| self.is_open(plan, rooms, *g, job));
        let speeds = open.map(|g| (self.speed(plan, rooms, g, job), g));
        speeds.max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1))).map(|(_, gpu)| gpu)
    }

    fn suits(&mut self, plan: &Plan<'_>, rooms: &GpuIndex, gpu: GpuIdx, job: JobIdx) -> bool {
        self.is_open(plan, rooms, gpu, job)
    }

    /// A gang when it is the oldest; tasks of one GPU from a window of the oldest, by
    /// maximum-weight matching with the open GPUs.
    fn next(&mut self, plan: &mut Plan<'_>, rooms: &GpuIndex) -> Option<(JobIdx, GpuSet)> {
        self.known.notice(plan);
        let oldest = rooms.waiting.first()?.1;
        if plan.spec(oldest).gpus > 1 {
            let gpus = rooms.gang(plan, oldest, |plan, gpu| self.suits(plan, rooms, gpu, oldest));
            if gpus.is_none() {
                placement::note_no_room(plan, oldest);
            }
            return gpus.map(|gpus| (oldest, gpus));
        }
        let window = usize::from(self.params.window);
        let single = |job: &JobIdx| plan.spec(*job).gpus == 1;
        let line = rooms.waiting.iter().map(|(_, job)| *job);
        let jobs: Vec<JobIdx> = line.take_while(single).take(window).collect();
        // Of the GPUs with the same profiles the least loaded are sufficient.
        let mut gpus: Vec<GpuIdx> = Vec::new();
        for with_same_profiles in rooms.open.values() {
            let open = with_same_profiles.iter().map(|(_, g)| *g);
            let open = open.filter(|g| jobs.iter().any(|j| self.is_open(plan, rooms, *g, *j)));
            gpus.extend(open.take(window.div_ceil(rooms.open.len())));
        }
        gpus.truncate(2 * window);
        let n = jobs.len() + gpus.len();
        let weight = |a: usize, b: usize| {
            let (a, b) = (a.min(b), a.max(b));
            if a >= jobs.len() || b < jobs.len() {
                return 0.0;
            }
            let (job, gpu) = (jobs[a], gpus[b - jobs.len()]);
            let open = self.is_open(plan, rooms, gpu, job);
            if open { self.speed(plan, rooms, gpu, job).max(1e-3) } else { 0.0 }
        };
        let mut weights = vec![0.0; n * n];
        for a in 0..jobs.len() {
            for b in jobs.len()..n {
                weights[a * n + b] = weight(a, b);
                weights[b * n + a] = weights[a * n + b];
            }
        }
        let mates = self.matcher.solve(n, |a, b| weights[a * n + b]);
        let matched = (0..jobs.len()).find(|i| mates[*i] != NONE);
        let Some(i) = matched else {
            placement::note_no_room(plan, oldest);
            return None;
        };
        let gpu = gpus[mates[i] as usize - jobs.len()];
        Some((jobs[i], GpuSet::from_slice(&[gpu])))
    }

    fn settle(
        &mut self,
        plan: &mut Plan<'_>,
        gpu: GpuIdx,
        service: JobIdx,
        room: &GpuTenants,
    ) -> ServiceConfig {
        self.known.notice(plan);
        self.cooling.grow_like(&plan.gpus, (0, Time::ZERO));
        let batch = plan.spec(service).knobs.batch;
        let (count, until) = &mut self.cooling[gpu];
        let look = (*until > plan.now).then_some(*until);
        let Some(seen) = room.seen else {
            *count = 0;
            plan.note(service, Reason::NoSamplesYet);
            return ServiceConfig { batch, permille: Knobs::SM_ALL / 2, stay: true, look };
        };
        let slo_s = plan.spec(service).slo.map_or(f64::INFINITY, |s| f64::from(s.p99_us) / 1e6);
        if seen.count != *count {
            *count = seen.count;
            if seen.p99_s > slo_s && !room.training.is_empty() {
                *until = plan.now + Span::from_secs(self.params.cool_s.max(1.0));
            }
        }
        let cooling = *until > plan.now;
        let look = cooling.then_some(*until);
        if cooling && !room.training.is_empty() {
            return ServiceConfig { batch, permille: Knobs::SM_ALL, stay: false, look };
        }
        let most = self.limits.most_beside(room.training.len());
        let permille = match self.busy(plan, gpu, service, seen.load_rps) {
            _ if room.training.is_empty() => Knobs::SM_ALL,
            busy => busy.min(most),
        };
        ServiceConfig { batch, permille, stay: true, look }
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::serving::testing::ServingWorld;
    use crate::testing::picture;
    use expect_test::expect;

    #[test]
    fn without_services_training_shares_idle_gpus() {
        let jobs = "a 0 1 4, b 0 1 6, c 1 2 3, d 2 1 3";
        expect![[r#"
            gpu0  a#########d
            gpu1  b#########b
        "#]]
        .assert_eq(&picture("muxflow-like", "1x2", jobs));
    }

    #[test]
    fn two_services_and_two_training_tasks() {
        let world = ServingWorld::of_two_services("muxflow-like");
        expect![[r#"
            no requests yet, 0.0s
              light has not reported a request yet; its share is a first guess until it does
              heavy has not reported a request yet; its share is a first guess until it does
              light has not reported a request yet; its share is a first guess until it does
              GPU 0: light 500 ‰ a 500 ‰
              GPU 1: heavy 500 ‰
            requests arrive, 2.0s
              GPU 0: light 100 ‰ a 900 ‰
              GPU 1: heavy 1000 ‰
            heavy misses its SLO, 3.0s
              GPU 0: light 100 ‰ a 900 ‰
              GPU 1: heavy 1000 ‰
            later, 11m 04s
              GPU 0: light 100 ‰ a 900 ‰
              GPU 1: heavy 359 ‰ b 641 ‰
        "#]]
        .assert_eq(&world.outcome);
    }
}
