//! Tiresias against the definition of 2D-LAS, written as lists that are walked from front to back
//! at every tick; and the laws that follow from the definition.

use crate::random::{self, CaseOptions};
use crate::{assert_same_decisions, fold};
use roommate_core::engine::Engine;
use roommate_core::idx::{GpuIdx, IdxVec, JobIdx};
use roommate_core::job::Phase;
use roommate_core::journal::gantt::Stays;
use roommate_core::math::rng::Rng;
use roommate_core::number::Number;
use roommate_core::plan::Plan;
use roommate_core::policy::{self, Policy};
use roommate_core::state::State;
use roommate_core::testing::{Outcome, TestCase};
use roommate_core::time::{Span, Time};
use serde_json::json;

const SECOND: u64 = 1_000_000;

/// What the definition records of a job. Times in µs.
#[derive(Clone, Copy, Default)]
struct Record {
    queue: usize,
    ran: u64,
    waited: u64,
    running: bool,
    ran_before: bool,
}

/// The nine steps of the definition, in its order and its words.
struct Literal {
    bounds: Vec<u64>,
    knob: Option<u64>,
    queues: Vec<Vec<JobIdx>>,
    records: IdxVec<JobIdx, Record>,
    last: Time,
}

impl Literal {
    fn new(bounds_s: &[u64], knob: Option<u64>) -> Self {
        let bounds: Vec<u64> = bounds_s.iter().map(|b| b * SECOND).collect();
        let queues = vec![Vec::new(); bounds.len() + 1];
        Self { bounds, knob, queues, records: IdxVec::new(), last: Time::ZERO }
    }

    fn move_to_tail(&mut self, job: JobIdx, queue: usize) {
        self.queues.iter_mut().for_each(|q| q.retain(|j| *j != job));
        self.queues[queue].push(job);
        self.records[job].queue = queue;
    }

    /// All jobs in the queues, in order of admission.
    fn all_jobs(&self) -> Vec<JobIdx> {
        let mut all: Vec<JobIdx> = self.queues.concat();
        all.sort();
        all
    }
}

impl Policy for Literal {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        let passed = (plan.now - self.last).0;
        self.last = plan.now;
        // 1. Completions leave their queue.
        self.queues.iter_mut().for_each(|q| q.retain(|j| plan.job(*j).phase != Phase::Done));
        // 3. Accounting, before the arrivals of step 2, which have no service yet.
        for job in self.all_jobs() {
            let r = &mut self.records[job];
            if r.running {
                r.ran += passed;
                r.ran_before = true;
            } else if r.ran_before {
                r.waited += passed;
            }
        }
        // 2. Arrivals are appended to the first queue.
        for job in plan.jobs.indices().skip(self.records.len()) {
            self.records.push(Record::default());
            if plan.pending.contains(job) {
                self.queues[0].push(job);
            }
        }
        // 4. Demotion, repeated while it holds.
        let mut demoted: Vec<JobIdx> = Vec::new();
        for job in self.all_jobs() {
            let gpus = u64::from(plan.spec(job).gpus);
            let r = self.records[job];
            let mut queue = r.queue;
            while r.running && queue < self.bounds.len() && r.ran * gpus >= self.bounds[queue] {
                queue += 1;
                self.move_to_tail(job, queue);
                demoted.push(job);
            }
        }
        // 5. Promotion. A job that was just demoted has to request its GPUs again, so it counts as
        //    waiting; otherwise an overdue job would change its queue at a second call.
        for job in self.all_jobs() {
            let r = self.records[job];
            let waits = (!r.running || demoted.contains(&job)) && r.queue > 0 && r.ran > 0;
            if waits && self.knob.is_some_and(|knob| r.waited >= knob * r.ran) {
                self.move_to_tail(job, 0);
                let r = &mut self.records[job];
                (r.ran, r.waited) = (0, 0);
            }
        }
        // 6. The walk.
        let mut free = plan.gpus.len();
        let mut chosen: Vec<JobIdx> = Vec::new();
        for &job in self.queues.iter().flatten() {
            let gpus = usize::from(plan.spec(job).gpus);
            if gpus <= free {
                free -= gpus;
                chosen.push(job);
            }
        }
        // 7. Preempt, then start.
        for job in self.all_jobs().into_iter().filter(|j| !chosen.contains(j)) {
            plan.release(job);
            self.records[job].running = false;
        }
        for &job in chosen.iter().filter(|j| !self.records[**j].running) {
            let idle = plan.gpus.indices();
            let idle = idle.filter(|g| plan.gpu(*g).tenants.is_empty());
            let gpus: Vec<GpuIdx> = idle.take(usize::from(plan.spec(job).gpus)).collect();
            plan.place(job, &gpus, plan.spec(job).knobs).unwrap();
        }
        for job in chosen {
            self.records[job].running = true;
        }
        // 8. Settle: in each queue, waiting jobs stand behind running ones.
        for queue in &mut self.queues {
            queue.sort_by_key(|j| !self.records[*j].running);
        }
        // 9. The definition is evaluated every second.
        plan.wake_at(plan.now + Span(SECOND));
    }
}

/// A case for `tiresias` that ignores nodes, with these bounds and this knob.
fn case(seed: u64, bounds: &[u64], knob: Option<u64>) -> TestCase {
    let mut case = random::case(seed, policy::find("tiresias").unwrap(), CaseOptions::PLAIN);
    case.params = policy::Params::new();
    case.params.insert("placement".into(), json!("count"));
    case.params.insert("bounds_gpu_s".into(), json!(bounds));
    case.params.insert("promote_knob".into(), json!(knob));
    case
}

fn some_bounds(seed: u64, multiple_of: u64) -> Vec<u64> {
    let mut rng = Rng::stream(seed, 83);
    let mut bound = 0;
    let mut next = |_| {
        bound += multiple_of * (1 + rng.below(40 / multiple_of));
        bound
    };
    (0..=seed % 3).map(&mut next).collect()
}

/// GPUs that each job holds in each second.
fn held(outcome: &Outcome) -> IdxVec<JobIdx, Vec<usize>> {
    let mut held: IdxVec<JobIdx, _> = vec![Vec::new(); outcome.finished.len()].into();
    for stay in fold(outcome, Stays::default()).ended {
        let row = &mut held[stay.job];
        let (from, to) = ((stay.from.0 / SECOND) as usize, (stay.to.0 / SECOND) as usize);
        row.resize(row.len().max(to), 0);
        row[from..to].iter_mut().for_each(|h| *h += stay.gpus.len());
    }
    held
}

#[test]
fn tiresias_is_what_its_definition_says() {
    let (mut preempted, mut promoted) = (0, 0);
    for seed in 0..4_000 {
        let bounds = some_bounds(seed, 1);
        let knob = [None, Some(1), Some(2), Some(5)][seed as usize % 4];
        let case = case(seed, &bounds, knob);
        let fast = case.run();
        let slow = case.run_policy(Box::new(Literal::new(&bounds, knob)), &mut |_| {});
        let context = random::compact(&case);
        assert!(fast.ended && slow.ended, "{context}does not end");
        assert_eq!(held(&fast), held(&slow), "{context}{}\n{}", fast.chart(), slow.chart());
        assert_eq!(fast.finished, slow.finished, "{context}");
        preempted += fast.metrics().preemptions;
        promoted += fast.journal.matches("promoted").count();
    }
    assert!(preempted > 1_000 && promoted > 100, "too few events: {preempted} {promoted}");
}

/// The queue of a job that was never promoted, from the service it has attained.
fn queue_of(state: &State, job: JobIdx, bounds: &[u64]) -> usize {
    let attained = state.attained(job);
    bounds.iter().filter(|b| **b * SECOND <= attained).count()
}

/// Calls `look` after every step of a run without promotions.
fn watch(seeds: u64, look: &mut dyn FnMut(&State, &[u64], &str)) {
    for seed in 0..seeds {
        let bounds = some_bounds(seed, 1);
        let case = case(seed, &bounds, None);
        let context = random::compact(&case);
        let outcome = case.run_looking(&mut |e: &mut Engine| look(e.state(), &bounds, &context));
        assert!(outcome.ended, "{context}");
    }
}

#[test]
fn no_job_waits_for_gpus_held_by_later_queues() {
    watch(1_500, &mut |state, bounds, context| {
        let queue = |j: JobIdx| queue_of(state, j, bounds);
        let gpus = |j: JobIdx| u32::from(state.spec(j).gpus);
        let stopped = |j: &JobIdx| state.job(*j).phase == Phase::Stopping;
        let told = state.jobs.indices().filter(stopped);
        for waits in state.pending.iter().chain(told) {
            let lower = state.placed.iter().filter(|j| queue(*j) > queue(waits)).map(gpus);
            let room = state.idle_gpus() + lower.sum::<u32>();
            assert!(gpus(waits) > room, "{context}at {}: {waits} could run", state.now);
        }
    });
}

#[test]
fn only_the_demoted_and_those_of_later_queues_are_stopped() {
    let mut stops = 0;
    watch(1_500, &mut |state, bounds, context| {
        let jobs = || state.jobs.indices();
        let now =
            |j: &JobIdx, phase| state.job(*j).since == state.now && state.job(*j).phase == phase;
        for stopped in jobs().filter(|j| now(j, Phase::Stopping)) {
            stops += 1;
            let a_second_ago =
                state.attained(stopped) - u64::from(state.spec(stopped).gpus) * SECOND;
            let crossed =
                |b: &u64| a_second_ago < b * SECOND && b * SECOND <= state.attained(stopped);
            let queue = |j| queue_of(state, j, bounds);
            let urgent = |j: JobIdx| queue(j) < queue(stopped);
            let allowed = bounds.iter().any(crossed)
                || jobs().filter(|j| now(j, Phase::Starting)).any(urgent);
            assert!(allowed, "{context}at {}: {stopped} was stopped for no job", state.now);
        }
    });
    assert!(stops > 500, "only {stops} stops were seen");
}

#[test]
fn without_bounds_it_is_fifo_with_backfill() {
    for seed in 0..1_000 {
        let mut case = case(seed, &[1_000_000_000], None);
        let las = case.run();
        assert_eq!(las.metrics().preemptions, 0);
        case.policy = "fifo-backfill".into();
        case.params = policy::Params::new();
        case.params.insert("rule".into(), json!("count"));
        assert_same_decisions(&las, &case.run(), &random::compact(&case));
    }
}

#[test]
fn times_have_no_scale() {
    for seed in 0..800 {
        // Bounds that every gang reaches at a whole second, so that ticks do not round.
        let bounds = some_bounds(seed, 12);
        let knob = [None, Some(2)][seed as usize % 2];
        let mut small = case(seed, &bounds, knob);
        small.jobs.retain(|a| 12 % a.spec.gpus == 0);
        let mut large = case(seed, &bounds.iter().map(|b| b * 7).collect::<Vec<_>>(), knob);
        large.jobs.clone_from(&small.jobs);
        for job in &mut large.jobs {
            job.submit *= 7;
            job.work *= 7.0;
            job.spec.work = Some(Number::of(job.work));
        }
        let scaled: Vec<_> = small.run().finished.iter().map(|f| f.map(|t| t * 7)).collect();
        assert_eq!(large.run().finished, scaled, "{}", random::compact(&small));
    }
}

#[test]
fn service_attained_is_gpu_time_held_and_work_done() {
    for seed in 0..800 {
        let case = case(seed, &some_bounds(seed, 1), [None, Some(2)][seed as usize % 2]);
        let mut had = 0;
        let outcome = case.run_looking(&mut |engine: &mut Engine| {
            let state = engine.state();
            had = state.jobs.indices().map(|j| state.attained(j)).sum();
        });
        let stays = fold(&outcome, Stays::default()).ended;
        let gave: u64 = stays.iter().map(|s| (s.to.0 - s.from.0) * s.gpus.len() as u64).sum();
        let work: f64 = case
            .jobs
            .iter()
            .zip(&outcome.finished)
            .filter(|(_, f)| f.is_some())
            .map(|(a, _)| a.work * f64::from(a.spec.gpus))
            .sum();
        assert_eq!(had, gave, "{}", random::compact(&case));
        // Restarts are free here, so no GPU time was held without progress either.
        assert_eq!(gave as f64 / SECOND as f64, work, "{}", random::compact(&case));
    }
}
