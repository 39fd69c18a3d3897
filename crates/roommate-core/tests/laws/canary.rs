//! Policies that break one law each. A check that lets one of them pass is worthless.

use crate::faulty_run::{Broken, FaultyRun, Law};
use crate::{Build, books, check, from_registry, random};
use roommate_core::idx::{GpuIdx, JobIdx, NodeIdx};
use roommate_core::knobs::Knobs;
use roommate_core::math::rng::Rng;
use roommate_core::placement::{self, Rule};
use roommate_core::plan::Plan;
use roommate_core::policy::{self, POLICIES, Policy};
use roommate_core::reason::Reason;
use roommate_core::state::{Costs, Infeasible, State};
use roommate_core::time::Span;
use std::sync::atomic::{AtomicU64, Ordering};

/// One random edit of any kind, sensible or not.
pub(crate) fn random_edit(plan: &mut Plan<'_>, rng: &mut Rng) {
    if plan.jobs.is_empty() {
        return;
    }
    let job = JobIdx(rng.below(plan.jobs.len() as u64) as u32);
    let knobs = Knobs {
        sm_permille: [0, 100, 300, 500, 1000, 1001, u16::MAX][rng.below(7) as usize],
        pace_permille: [0, 400, 1000, 1000, 1001][rng.below(5) as usize],
        floor_permille: [0, 0, 0, 990, u16::MAX][rng.below(5) as usize],
        mem_mib: [0, 5_000, 9_000, 50_000][rng.below(4) as usize],
        cpu_milli: [0, 500, 2_000][rng.below(3) as usize],
        host_mib: [0, 4_000, 20_000][rng.below(3) as usize],
        ..Knobs::WHOLE
    };
    match rng.below(8) {
        0..=2 => {
            let wanted = u64::from(plan.spec(job).gpus);
            let from = rng.below(plan.gpus.len() as u64 + 1) as u32;
            let mut gpus: Vec<GpuIdx> = (from..from + wanted as u32).map(GpuIdx).collect();
            if rng.chance(0.1) {
                gpus.reverse();
            }
            let _ = plan.place(job, &gpus, knobs);
        }
        3 => {
            placement::place(plan, job, Rule::Spread);
        }
        4 => {
            let _ = plan.tune(job, knobs);
        }
        5 => plan.release(job),
        6 => plan.suspend(job),
        _ if rng.chance(0.2) => {
            let _ = plan.reject(job, Reason::Cancelled);
        }
        _ => plan.note(job, Reason::Promoted),
    }
    if rng.chance(0.1) {
        plan.wake_at(plan.now + Span(1 + rng.below(9_000_000)));
    }
}

/// Makes random edits and commits them.
pub(crate) struct Chaos(Rng);

impl Chaos {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Rng::stream(seed, 80))
    }
}

impl Policy for Chaos {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        for _ in 0..self.0.below(8) {
            random_edit(plan, &mut self.0);
        }
    }
}

/// Never starts a job.
struct Sleeper;

impl Policy for Sleeper {
    fn schedule(&mut self, _: &mut Plan<'_>) {}
}

/// Starts every job that fits, and releases every job that runs when it is called.
struct FlipFlop;

impl Policy for FlipFlop {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        if let Some(job) = plan.placed.first().filter(|_| plan.news.events.is_empty()) {
            plan.release(job);
        } else {
            start_all(plan, false);
        }
    }
}

/// Starts jobs that fit, from the front or from the back, depending on external state.
struct Fickle;

static MOOD: AtomicU64 = AtomicU64::new(0);

impl Policy for Fickle {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        let mood = MOOD.fetch_add(1, Ordering::Relaxed);
        start_all(plan, mood.is_multiple_of(3));
    }
}

/// Rejects every job that has to wait.
struct Snob;

impl Policy for Snob {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        start_all(plan, false);
        let waiting: Vec<JobIdx> = plan.pending.iter().collect();
        for job in waiting {
            let _ = plan.reject(job, Reason::Cancelled);
        }
    }
}

struct Panics;

impl Policy for Panics {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        assert!(plan.placed.len() < 2, "two jobs are too many for me");
        start_all(plan, false);
    }
}

fn start_all(plan: &mut Plan<'_>, backwards: bool) {
    let mut waiting: Vec<JobIdx> = plan.pending.iter().collect();
    if backwards {
        waiting.reverse();
    }
    for job in waiting {
        placement::place(plan, job, Rule::Count);
    }
}

/// The laws that this policy breaks in the first few runs of `fifo-backfill`.
fn broken_by(build: Build<'_>) -> Vec<Law> {
    let entry = policy::find("fifo-backfill").unwrap();
    let broken =
        |seed| check(&FaultyRun::random(seed, entry), build).err().map(|Broken(law, _)| law);
    (0..40).filter_map(broken).collect()
}

fn caught(build: Build<'_>, law: Law) {
    let found = broken_by(build);
    assert!(found.contains(&law), "{law:?} was not missed; found {found:?}");
}

#[test]
fn policies_that_break_a_law_are_caught() {
    caught(&|_| Box::new(Sleeper), Law::EveryFeasibleJobFinishes);
    caught(&|_| Box::new(Snob), Law::EveryFeasibleJobFinishes);
    caught(&|_| Box::new(FlipFlop), Law::SecondLook);
    caught(&|_| Box::new(Fickle), Law::SameSeedSameJournal);
    caught(&|_| Box::new(Panics), Law::NeverPanics);
    // The journal names `fifo-backfill`, but another policy decided.
    let stranger = || policy::find("srtf").unwrap().build(&policy::Params::new()).unwrap();
    caught(&|_| stranger(), Law::Replay);
    assert_eq!(broken_by(&from_registry), [], "the real policy passes the same runs");
}

/// Tries to allocate every GPU twice, and counts the refusals.
struct Overcommitter;

static REFUSED: AtomicU64 = AtomicU64::new(0);

impl Policy for Overcommitter {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        start_all(plan, false);
        let waiting: Vec<JobIdx> = plan.pending.iter().collect();
        for job in waiting {
            let taken: Vec<GpuIdx> =
                plan.placed.iter().flat_map(|j| plan.job(j).gpus.to_vec()).collect();
            for gpu in taken {
                if plan.spec(job).gpus == 1 && plan.spec(job).allows(plan.gpu(gpu).gpu_model) {
                    let knobs = plan.spec(job).knobs;
                    assert_eq!(plan.place(job, &[gpu], knobs), Err(Infeasible::Share));
                    REFUSED.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }
}

#[test]
fn a_plan_refuses_to_allocate_a_gpu_twice() {
    let entry = policy::find("fifo-backfill").unwrap();
    for seed in 0..40 {
        let played = crate::faulty_run::play(
            &FaultyRun::random(seed, entry),
            Box::new(Overcommitter),
            false,
        );
        assert_eq!(played.err(), None);
    }
    assert!(REFUSED.load(Ordering::Relaxed) > 100, "too few attempts");
}

#[test]
fn falsified_accounts_are_noticed() {
    let cook = |cook: fn(&mut State)| {
        let case = random::case(3, &POLICIES[0], random::CaseOptions::PLAIN);
        let mut state = State::new(&case.cluster, Costs::default());
        state.profiles = case.profiles.clone().into();
        for job in &case.jobs {
            state.specs.push(job.spec.clone());
            state.jobs.push(roommate_core::job::Job::expected());
        }
        assert_eq!(books::check(&state), Ok(()));
        cook(&mut state);
        books::check(&state).expect_err("the accounts were falsified").0
    };
    assert_eq!(cook(|s| s.gpus[GpuIdx(0)].mem_used_mib += 1), Law::Books);
    assert_eq!(cook(|s| s.gpus[GpuIdx(0)].sm_used_permille = 1), Law::Books);
    assert_eq!(cook(|s| s.gpus[GpuIdx(0)].tenants.push(JobIdx(0))), Law::Books);
    assert_eq!(cook(|s| s.nodes[NodeIdx(0)].cpu_used_milli = 1), Law::Books);
    assert_eq!(cook(|s| s.nodes[NodeIdx(0)].host_used_mib = 1), Law::Books);
    assert_eq!(cook(|s| s.nodes[NodeIdx(0)].idle -= 1), Law::Books);
    assert_eq!(cook(|s| s.nodes[NodeIdx(0)].up = false), Law::Books);
    assert_eq!(cook(|s| assert!(s.pending.insert(JobIdx(0)))), Law::Books);
    assert_eq!(cook(|s| s.jobs[JobIdx(0)].gpus.push(GpuIdx(0))), Law::Books);
}
