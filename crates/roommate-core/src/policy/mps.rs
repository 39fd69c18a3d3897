//! Baselines of co-location: several jobs on a GPU, first come, first served.
//!
//! # Idea
//! Jobs start first come, first served, on the best GPU, up to `max_tasks` on one GPU; no job is
//! moved or stopped. `sharing` is how they share a GPU: all at once without limits (`mps`), each
//! confined to an equal part of the SMs until it ends (`mps-split`), or in the time slices of the
//! driver (`time-slicing`). `choice` is which GPU is best: the emptiest, a random one
//! (`random-colocate`), or the one with the least predicted slowdown, from the SM and memory
//! utilisation of jobs alone (`kernel-est`). A service is placed beside another service only if
//! every GPU with room has one.
//!
//! # Reads / does / wakes
//! Reads GPUs, memory, CPU and GPU model; `kernel-est` also the utilisation of profiles, measured
//! or else predicted, and measured step times of jobs that share. Never reads durations, batch
//! sizes or SLOs; services share like any other job. Starts jobs, never tunes, moves or stops one.
//! Wakes when a job arrives or leaves, and when a node comes up or goes down; never by time.
//!
//! # Differs from the paper
//! `mps` stands for the MPS-based sharing that `iadeep` was compared with, of which only the name
//! is published. `kernel-est` stands for the estimator of Xu et al. (`HotCloud` 2019): their
//! regression over kernel metrics is here a linear function of two products (a job's own
//! utilisation × that of its roommates, for SMs and for memory bandwidth), fitted as measurements
//! come in. `mps-split` gives every job one of `max_tasks` equal slots, because the share of a
//! running MPS client cannot be changed. An idle GPU is always preferred, except by
//! `random-colocate`. The studies with these baselines have one service on each GPU, so a random
//! GPU for a service is one without another service. `kernel-est` takes in a sample when it is next
//! asked, with the roommates of that moment; one of those it was measured with may have left.

use crate::event::Event;
use crate::idx::{GpuIdx, GpuSet, JobIdx};
use crate::job::Class;
use crate::knobs::Knobs;
use crate::math::rng::Rng;
use crate::performance::slowdown_line::{SlowdownLine, Use};
use crate::placement;
use crate::plan::Plan;
use crate::policy::{Fuzz, Policy};
use crate::state::State;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Sharing {
    /// All at once, without limits.
    #[default]
    Free,
    /// Each job confined to one of `max_tasks` equal parts.
    Split,
    /// In the time slices of the driver.
    Turns,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Choice {
    /// The fewest jobs, then the most free memory.
    #[default]
    Emptiest,
    /// A random GPU with room.
    Random,
    /// The least predicted slowdown, of the new job and of the present tenants.
    Predicted,
}

registry! { "mps.rs"
    ("mps", family: CoLocation, knows_durations: false, preset: r"{}",
        summary: "up to three jobs on a GPU at once, without limits, the emptiest GPU first",
        paper: "-", compat: &[])
    ("mps-split", family: CoLocation, knows_durations: false,
        preset: r#"{"sharing": "split", "max_tasks": 2}"#,
        summary: "up to two jobs on a GPU, each confined to half of its SMs",
        paper: "-", compat: &[])
    ("time-slicing", family: TimeSharing, knows_durations: false, preset: r#"{"sharing": "turns"}"#,
        summary: "up to three jobs on a GPU, in the time slices of the driver",
        paper: "-", compat: &[])
    ("random-colocate", family: CoLocation, knows_durations: false,
        preset: r#"{"choice": "random"}"#,
        summary: "up to three jobs on a GPU at once, on a random GPU with room",
        paper: "-", compat: &[])
    ("kernel-est", family: CoLocation, knows_durations: false, preset: r#"{"choice": "predicted"}"#,
        summary: "up to three jobs on a GPU, with the least slowdown predicted from utilisation",
        paper: "Xu et al., HotCloud 2019", compat: &[])
}

/// Parameters of `mps`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Params {
    /// How jobs on one GPU share it.
    sharing: Sharing,
    /// Which GPU a job is placed on.
    choice: Choice,
    /// Most jobs on a GPU.
    max_tasks: u8,
    /// Utilisation assumed for a profile of which nothing is known.
    util_default: f64,
}

impl Default for Params {
    fn default() -> Self {
        Self { sharing: Sharing::Free, choice: Choice::Emptiest, max_tasks: 3, util_default: 0.5 }
    }
}

/// Values that the laws try.
fn fuzz(f: &mut Fuzz<'_>) {
    // Not 3: a third of a GPU is not a whole number of permille, so steps would not end at a tick.
    f.pick("max_tasks", &[1, 2, 4, 5]);
    f.pick("util_default", &[0.1, 0.3, 0.9]);
}

struct Colocate {
    params: Params,
    /// Waiting jobs with a random seed each, so that a repeated attempt to place a job draws no new
    /// numbers.
    waiting: BTreeMap<JobIdx, u64>,
    slowdown: SlowdownLine,
    /// GPUs with room, best first: whether the job would be a second service there, and the price.
    open: Vec<(bool, f64, GpuIdx)>,
}

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    if !(1..=8).contains(&params.max_tasks) {
        return Err("max_tasks: expected 1 to 8".into());
    }
    if !(0.0..=1.0).contains(&params.util_default) {
        return Err("util_default: expected 0 to 1".into());
    }
    Ok(Colocate {
        params,
        waiting: BTreeMap::new(),
        slowdown: SlowdownLine::default(),
        open: Vec::new(),
    })
}

impl Policy for Colocate {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        self.update_queue(plan);
        while let Some((job, seed)) = self.waiting.first_key_value().map(|(j, s)| (*j, *s)) {
            let knobs = self.knobs(plan, job);
            let found = self.find(plan, job, knobs, seed);
            if found.is_none_or(|gpus| plan.place(job, &gpus, knobs).is_err()) {
                placement::note_no_room(plan, job);
                return;
            }
            self.waiting.pop_first();
        }
    }
}

impl Colocate {
    fn update_queue(&mut self, plan: &mut Plan<'_>) {
        for job in plan.news.left {
            self.waiting.remove(job);
        }
        for job in plan.news.ready {
            if plan.pending.contains(*job) {
                self.waiting.insert(*job, plan.rng.next_u64());
            }
        }
        if self.params.choice == Choice::Predicted {
            plan.news.events.iter().for_each(|event| self.learn(plan, event));
        }
    }

    fn learn(&mut self, plan: &Plan<'_>, event: &Event) {
        let Event::Sampled { job, sample } = event else { return };
        let [gpu] = plan.job(*job).gpus[..] else { return };
        let shares = plan.gpu(gpu).tenants.len() > 1;
        if sample.step_s > 0.0 && shares && plan.spec(*job).class != Class::Service {
            let alone_s = plan.alone_step_s(*job, &[gpu]);
            // Very large slowdowns of a job that hardly runs would spoil the fit.
            let slowdown = (sample.step_s / alone_s - 1.0).clamp(0.0, 10.0);
            self.slowdown.learn(self.pressure(plan, gpu, *job, None), slowdown);
        }
    }

    fn uses(&self, state: &State, job: JobIdx) -> Use {
        state.demand(state.spec(job).profile).unwrap_or([self.params.util_default; 2])
    }

    /// Own utilisation × that of the other tenants of the GPU, and of a job that is about to join
    /// them.
    fn pressure(&self, state: &State, gpu: GpuIdx, of: JobIdx, joins: Option<JobIdx>) -> Use {
        let others = state.gpu(gpu).tenants.iter().copied().chain(joins).filter(|t| *t != of);
        let own = self.uses(state, of);
        others
            .map(|other| self.uses(state, other))
            .fold([0.0; 2], |sum, other| [sum[0] + own[0] * other[0], sum[1] + own[1] * other[1]])
    }

    fn knobs(&self, state: &State, job: JobIdx) -> Knobs {
        let requested = state.spec(job).knobs;
        match self.params.sharing {
            Sharing::Free => Knobs { sm_permille: 0, ..requested },
            Sharing::Split => {
                let part = Knobs::SM_ALL / u16::from(self.params.max_tasks);
                Knobs { sm_permille: part, ..requested }
            }
            Sharing::Turns => Knobs { sm_permille: 0, turns: true, ..requested },
        }
    }

    /// The best GPUs for the gang, ascending by index.
    fn find(&mut self, plan: &State, job: JobIdx, knobs: Knobs, seed: u64) -> Option<GpuSet> {
        let mut open = std::mem::take(&mut self.open);
        open.clear();
        for gpu in plan.gpus.indices() {
            if self.has_room(plan, job, gpu, knobs) {
                let price = self.price(plan, job, gpu, seed);
                open.push((meets_a_service(plan, job, gpu), price, gpu));
            }
        }
        open.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then(a.2.cmp(&b.2)));
        let mut gpus = GpuSet::new();
        let need = usize::from(plan.spec(job).gpus);
        for (_, _, gpu) in &open {
            let node = plan.gpu(*gpu).node;
            let here = gpus.iter().filter(|g| plan.gpu(**g).node == node).count();
            if gpus.len() < need && (here as u32) < plan.node(node).room_for(knobs) {
                gpus.push(*gpu);
            }
        }
        self.open = open;
        gpus.sort_unstable();
        (gpus.len() == need).then_some(gpus)
    }

    fn has_room(&self, state: &State, job: JobIdx, gpu: GpuIdx, knobs: Knobs) -> bool {
        let on = state.gpu(gpu);
        let most = usize::from(self.params.max_tasks.min(state.max_tenants));
        let mem_mib = state.gpu_models[usize::from(on.gpu_model)].mem_mib;
        let fits = mem_mib == 0 || on.mem_used_mib.saturating_add(knobs.mem_mib) <= mem_mib;
        let usable = state.node(on.node).up && state.spec(job).allows(on.gpu_model);
        usable && fits && on.tenants.len() < most
    }

    /// Cost of placing the job on a GPU; the least is best.
    fn price(&self, state: &State, job: JobIdx, gpu: GpuIdx, seed: u64) -> f64 {
        let on = state.gpu(gpu);
        let fullness = match state.gpu_models[usize::from(on.gpu_model)].mem_mib {
            0 => 0.0,
            all => f64::from(on.mem_used_mib) / f64::from(all),
        };
        match self.params.choice {
            Choice::Random => Rng::stream(seed, gpu.0.into()).unit(),
            Choice::Emptiest => on.tenants.len() as f64 + fullness / 2.0,
            Choice::Predicted if on.tenants.is_empty() => -1.0,
            Choice::Predicted => {
                let newcomer = self.slowdown.predict(self.pressure(state, gpu, job, None));
                let residents = on.tenants.iter().map(|t| {
                    let with = self.pressure(state, gpu, *t, Some(job));
                    let without = self.pressure(state, gpu, *t, None);
                    self.slowdown.predict(with) - self.slowdown.predict(without)
                });
                newcomer + residents.sum::<f64>()
            }
        }
    }
}

fn meets_a_service(state: &State, job: JobIdx, gpu: GpuIdx) -> bool {
    let serves = |j: JobIdx| state.spec(j).class == Class::Service;
    serves(job) && state.gpu(gpu).tenants.iter().any(|t| serves(*t))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Action;
    use crate::journal::{self, Observer, StepView};
    use crate::testing::{TestCase, picture};
    use expect_test::expect;

    /// GPUs on which each job started.
    fn places(case: &TestCase) -> BTreeMap<JobIdx, GpuSet> {
        #[derive(Default)]
        struct Places(BTreeMap<JobIdx, GpuSet>);
        impl Observer for Places {
            fn step(&mut self, step: &StepView<'_>) {
                for action in step.actions {
                    if let Action::Start(job, place) = action {
                        self.0.insert(*job, place.gpus.clone());
                    }
                }
            }
        }
        let mut places = Places::default();
        journal::read(case.run().journal.as_bytes(), &mut places).unwrap();
        places.0
    }

    #[test]
    fn services_are_kept_apart() {
        for policy in ["mps", "mps-split", "time-slicing", "random-colocate", "kernel-est"] {
            for seed in 0..20 {
                let mut case = TestCase::new(policy, "1x3", "a 0 1 9, s 0 1 9, t 0 1 9, u 0 1 9");
                case.seed = seed;
                for service in &mut case.jobs[1..] {
                    service.spec.class = Class::Service;
                    (service.work, service.spec.work) = (f64::INFINITY, None);
                }
                let places = places(&case);
                let mut gpus: Vec<&GpuSet> = (1..4).map(|j| &places[&JobIdx(j)]).collect();
                gpus.sort();
                gpus.dedup();
                assert_eq!(gpus.len(), 3, "{policy} {seed}: {places:?}");
            }
        }
    }

    #[test]
    fn an_emptier_gpu_with_too_little_memory_is_skipped() {
        let mut case = TestCase::new("mps", "1x2:v100", "a 0 1 9, b 0 1 9, c 0 1 9, d 1 1 4");
        for (job, mem_mib) in case.jobs.iter_mut().zip([14_000, 2_000, 2_000, 4_000]) {
            job.spec.knobs.mem_mib = mem_mib;
        }
        let places = places(&case);
        assert_eq!(places[&JobIdx(0)][..], [GpuIdx(0)]);
        assert_eq!(places[&JobIdx(3)][..], [GpuIdx(1)], "not beside the large job");
    }

    #[test]
    fn idle_gpus_first_then_the_emptiest() {
        expect![[r#"
            gpu0  a######
            gpu1  bb######b
        "#]]
        .assert_eq(&picture("mps", "1x2", "a 0 1 4, b 0 1 6, c 1 1 3, d 2 1 3"));
    }

    #[test]
    fn mps_split_has_two_slots_and_no_backfill() {
        expect![[r#"
            gpu0  ############
            gpu1  bbbb....dddd
        "#]]
        .assert_eq(&picture("mps-split", "1x2", "a 0 1 4, b 0 1 4, c 0 1 4, d 1 2 2, e 1 1 2"));
    }

    #[test]
    fn a_random_gpu_may_be_a_shared_one() {
        expect![[r#"
            gpu0  ########.eeee
            gpu1
            gpu2  aaaa.....dddd
        "#]]
        .assert_eq(&picture(
            "random-colocate",
            "1x3",
            "a 0 1 4, b 0 1 4, c 0 1 4, d 9 1 4, e 9 1 4",
        ));
    }

    #[test]
    fn the_slowdown_is_fitted_to_measurements() {
        let mut slowdown = SlowdownLine::default();
        assert!((slowdown.predict([0.5, 0.0]) - 0.5).abs() < 1e-9);
        // The slowdown minus 1 is twice the memory product.
        for i in 0..400 {
            let x = [f64::from(i % 7) / 10.0, f64::from(i % 5) / 10.0];
            slowdown.learn(x, 2.0 * x[1]);
        }
        assert!(slowdown.predict([0.5, 0.0]).abs() < 0.1);
        assert!((slowdown.predict([0.0, 0.5]) - 1.0).abs() < 0.1);
    }
}
