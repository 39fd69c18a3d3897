//! Random, contradictory facts: an engine must survive any sequence of them with any policy.

use crate::canary::Chaos;
use crate::faulty_run::{Broken, Law};
use crate::{books, random};
use roommate_core::engine::Engine;
use roommate_core::event::{Action, Event, Sample, Served};
use roommate_core::idx::{JobIdx, NodeIdx};
use roommate_core::interference::Undisturbed;
use roommate_core::math::rng::Rng;
use roommate_core::number::Number;
use roommate_core::policy::{Entry, POLICIES, Policy};
use roommate_core::reason::Reason;
use roommate_core::testing::TestCase;
use roommate_core::time::{Span, Time};

/// Numbers that break arithmetic.
const ODD: &[f64] = &[
    0.0,
    -0.0,
    1.0,
    7.5,
    -3.0,
    1e-310,
    1e300,
    f64::MAX,
    f64::INFINITY,
    f64::NEG_INFINITY,
    f64::NAN,
];

fn odd(rng: &mut Rng) -> Number {
    Number::of(ODD[rng.below(ODD.len() as u64) as usize])
}

/// Any fact about any job or node, existing or not.
fn nonsense(rng: &mut Rng, engine: &Engine) -> Event {
    let job = JobIdx(match rng.below(30) {
        0 => u32::MAX,
        _ => rng.below(engine.state().jobs.len() as u64 + 2) as u32,
    });
    let node = NodeIdx(rng.below(engine.state().nodes.len() as u64 + 2) as u32);
    let done = odd(rng);
    match rng.below(16) {
        0..=2 => Event::Submitted(job),
        3..=5 => Event::Started(job),
        6 => Event::Stopped { job, done },
        7 => Event::Tuned(job),
        8 => Event::Finished(job),
        9 => Event::Failed { job, reason: Reason::Crashed, done },
        10 => Event::Failed { job, reason: Reason::NodeLost(node), done },
        11 => Event::Cancelled(job),
        12 | 13 => {
            let done = rng.chance(0.5).then(|| odd(rng));
            let sample = Sample { step_s: odd(rng), done, p99_us: 1, ..Sample::default() };
            Event::Sampled { job, sample }
        }
        14 => Event::NodeUp(node),
        _ => Event::NodeDown(node),
    }
}

/// The confirmation of an action; sometimes it comes twice.
fn answer(rng: &mut Rng, action: &Action) -> Vec<Event> {
    let job = action.job();
    let fact = match action {
        Action::Start(..) | Action::Move(..) => Event::Started(job),
        Action::Stop(_) | Action::Suspend(_) => Event::Stopped { job, done: odd(rng) },
        Action::Tune(..) => Event::Tuned(job),
        Action::Reject(..) => Event::Cancelled(job),
    };
    vec![fact; 1 + usize::from(rng.chance(0.1))]
}

/// Feeds random facts to an engine; the accounts must be right and a second call must change
/// nothing.
fn check(seed: u64, case: &TestCase, policy: Box<dyn Policy>, calm: bool) -> Result<(), Broken> {
    let mut rng = Rng::stream(seed, 79);
    let mut services = Rng::stream(seed, 115);
    let mut engine = Engine::new(&case.cluster, case.costs, policy, Box::new(Undisturbed), seed);
    for profile in &case.profiles {
        engine.add_profile(profile.clone());
    }
    let mut now = Time::ZERO;
    let mut answers: Vec<Event> = Vec::new();
    for step in 0..50 {
        if let Some(job) = case.jobs.get(step) {
            engine.add_job(job.spec.clone());
        }
        let mut facts: Vec<Event> = answers.extract_if(.., |_| rng.chance(0.6)).collect();
        for _ in 0..rng.below(4) {
            facts.push(nonsense(&mut rng, &engine));
        }
        if services.chance(0.2) {
            let job = JobIdx(services.below(engine.state().jobs.len() as u64 + 2) as u32);
            let served = Served { windows: u32::MAX, requests: u64::MAX, ..Served::default() };
            facts.push(Event::Served { job, served });
        }
        // From the same instant again to a century later.
        now += match rng.below(12) {
            0..=3 => Span::ZERO,
            4..=10 => Span(rng.below(5_000_000)),
            _ => Span::from_secs(1e6 * rng.unit() * 3e3),
        };
        let step = engine.step(now, &facts);
        let (asked, actions) = (step.asked, step.actions.to_vec());
        books::check(engine.state())?;
        if asked && calm {
            let again = engine.look_again();
            Broken::unless(again.actions.is_empty(), Law::SecondLook, || {
                format!("at {now} after {facts:?}: {actions:?}, then {:?}", again.actions)
            })?;
        }
        for action in &actions {
            answers.extend(answer(&mut rng, action));
        }
    }
    Ok(())
}

fn run(
    entry: &Entry,
    seeds: std::ops::Range<u64>,
    calm: bool,
    build: &dyn Fn(&TestCase) -> Box<dyn Policy>,
) {
    for seed in seeds {
        let case = random::case(seed, entry, random::CaseOptions::WILD);
        let tried = std::panic::AssertUnwindSafe(|| check(seed, &case, build(&case), calm));
        let found = std::panic::catch_unwind(tried);
        let broken = found.unwrap_or_else(|_| Err(Broken(Law::NeverPanics, "see above".into())));
        if let Err(Broken(law, how)) = broken {
            panic!("{}{law:?}: {how}", random::compact(&case));
        }
    }
}

#[test]
fn no_sequence_of_facts_makes_an_engine_panic() {
    for entry in POLICIES {
        run(entry, 0..700, true, &|case| entry.build(&case.params).unwrap());
    }
}

#[test]
fn a_waiting_job_takes_the_place_of_one_moved_in_the_same_call() {
    let entry = POLICIES.iter().find(|e| e.name == "horus-plus").unwrap();
    run(entry, 17_941..17_942, true, &|case| entry.build(&case.params).unwrap());
}

#[test]
fn no_sequence_of_facts_makes_a_random_policy_panic() {
    // The policy shares GPUs, tunes, moves and rejects at random; only the accounts are checked.
    run(&POLICIES[0], 0..2_000, false, &|case| Box::new(Chaos::new(case.seed)));
}

#[test]
fn a_node_goes_down_under_a_job_with_absurd_progress() {
    // Steps of almost no length: the job must lose its GPUs nevertheless.
    let case = TestCase::new("fifo", "1x1", "a 0 1 5");
    let policy = roommate_core::policy::find("fifo").unwrap().build(&case.params).unwrap();
    let mut engine = Engine::new(&case.cluster, case.costs, policy, Box::new(Undisturbed), 0);
    engine.add_profile(case.profiles[0].clone());
    let job = engine.add_job(case.jobs[0].spec.clone());
    let sample = Sample { step_s: Number::of(1e-310), ..Sample::default() };
    engine.step(Time::ZERO, &[Event::Submitted(job)]);
    engine.step(Time::ZERO, &[Event::Started(job), Event::Sampled { job, sample }]);
    engine.step(Time::from_secs(9.0), &[Event::NodeDown(NodeIdx(0))]);
    assert!(!engine.state().job(job).is_placed());
    assert!(!engine.state().node(NodeIdx(0)).up);
}
