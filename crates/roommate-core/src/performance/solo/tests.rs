use super::*;
use crate::engine::Engine;
use crate::event::{Action, Event};
use crate::idx::ProfileIdx;
use crate::interference::Undisturbed;
use crate::job::Spec;
use crate::math::rng::Rng;
use crate::number::Number;
use crate::policy::{self, Params};
use crate::profile::Profile;
use crate::state::Costs;
use crate::time::{Span, Time};

/// Jobs that share one GPU, sampled by hand.
struct Bench {
    engine: Engine,
    rng: Rng,
    now: Time,
}

impl Bench {
    /// An engine with two profiles whose step lengths are not known.
    fn new() -> Self {
        let mps = policy::find("mps").unwrap().build(&Params::new()).unwrap();
        let costs = Costs { restart: Span::ZERO, ..Costs::default() };
        let cluster = "1x1".parse().unwrap();
        let mut engine = Engine::new(&cluster, costs, mps, Box::new(Undisturbed), 0);
        for true_s in [0.1, 0.4] {
            engine.add_profile(Profile::of_step(true_s).with_unknown_step());
        }
        Self { engine, rng: Rng::new(7), now: Time::ZERO }
    }

    fn submit(&mut self, profile: u32) -> JobIdx {
        let job = self.engine.add_job(Spec::training(1, 1e6, ProfileIdx(profile)));
        let step = self.engine.step(self.now, &[Event::Submitted(job)]);
        assert!(matches!(step.actions, [Action::Start(..)]));
        self.engine.step(self.now, &[Event::Started(job)]);
        job
    }

    /// Samples of steps of this length that scatter by 5 %.
    fn sample(&mut self, job: JobIdx, step_s: f64, count: u32) {
        for _ in 0..count {
            self.now += Span::from_secs(10.0);
            let step_s = Number::of(step_s * (0.05 * self.rng.normal()).exp());
            let sample = Sample { step_s, ..Sample::default() };
            self.engine.step(self.now, &[Event::Sampled { job, sample }]);
        }
    }

    fn belief(&self, profile: u32) -> Belief {
        self.engine.state().solo_belief(ProfileIdx(profile), Some(0))
    }

    fn extra(&self, own: u32, other: u32) -> f64 {
        pairs::extra(self.engine.state(), 0, ProfileIdx(own), ProfileIdx(other))
    }
}

#[test]
fn the_length_of_a_step_alone_is_learned_with_an_honest_error() {
    let mut within = 0;
    for seed in 0..200 {
        let mut bench = Bench::new();
        bench.rng = Rng::new(seed);
        let job = bench.submit(0);
        assert_eq!(bench.engine.state().step_s(ProfileIdx(0)), Profile::UNKNOWN_STEP_S);
        assert!(bench.belief(0).error.is_infinite() && !bench.belief(0).is_measured);
        bench.sample(job, 0.1, 12);
        let Belief { step_s, error, is_measured, .. } = bench.belief(0);
        assert!(is_measured && (0.005..0.03).contains(&error), "{error}");
        within += u32::from((step_s / 0.1 - 1.0).abs() < 2.0 * error);
        assert_eq!(bench.engine.state().done_s(job), bench.engine.state().done(job) * step_s);
    }
    assert!((180..=200).contains(&within), "within two errors: {within} of 200");
}

#[test]
fn slow_changes_are_followed() {
    let mut average = Average::default();
    (0..1000).for_each(|_| average.add(1.0));
    assert!(average.error() < 0.01);
    (0..48).for_each(|_| average.add(2.0));
    assert!((1.9..2.0).contains(&average.mean), "{average:?}");
}

#[test]
fn a_provisional_length_teaches_nothing_of_pairs() {
    let mut bench = Bench::new();
    let (a, b) = (bench.submit(0), bench.submit(1));
    // The usual pair is expected to run at 0.8 of its speed.
    let expected = bench.extra(0, 1);
    let version = bench.engine.state().pairs.version();
    bench.sample(a, 0.15, 20);
    bench.sample(b, 0.80, 20);
    assert_eq!(bench.engine.state().pairs.version(), version);
    let Belief { step_s, error, is_measured, .. } = bench.belief(0);
    assert!(!is_measured && error >= PROVISIONAL, "{error}");
    assert!((step_s * (1.0 + expected) / 0.15 - 1.0).abs() < 0.05, "{step_s}");
    // Once it was alone, what it was among roommates counts no more.
    bench.engine.step(bench.now, &[Event::Cancelled(b)]);
    bench.sample(a, 0.1, 20);
    assert!(bench.belief(0).is_measured && (bench.belief(0).step_s / 0.1 - 1.0).abs() < 0.05);
}

#[test]
fn a_job_is_measured_alone_while_its_roommates_stand_still() {
    let mut bench = Bench::new();
    let (a, _b) = (bench.submit(0), bench.submit(1));
    bench.sample(a, 0.2, 4);
    let pace = bench.engine.state().job(a).meter.step_s;
    bench.now += Span::from_secs(1.0);
    let sample = Sample { step_s: Number::of(0.1), alone: true, ..Sample::default() };
    bench.engine.step(bench.now, &[Event::Sampled { job: a, sample }]);
    // It is as fast as before, but now it is known what its roommate costs it.
    assert_eq!(bench.engine.state().job(a).meter.step_s, pace);
    assert!(bench.belief(0).is_measured && bench.belief(0).step_s == 0.1);
    assert_eq!(bench.engine.state().pairs.measured(0, ProfileIdx(0), ProfileIdx(1)), None);
    bench.sample(a, 0.2, 20);
    assert!((bench.extra(0, 1) - 1.0).abs() < 0.1, "{}", bench.extra(0, 1));
}

#[test]
fn pairs_are_means_of_samples_that_scatter() {
    let mut bench = Bench::new();
    let a = bench.submit(0);
    bench.sample(a, 0.1, 20);
    let b = bench.submit(1);
    bench.sample(a, 0.15, 40);
    bench.sample(b, 0.40, 40);
    assert!((bench.extra(0, 1) - 0.5).abs() < 0.06, "{}", bench.extra(0, 1));
    assert_eq!(bench.engine.state().pairs.measured(0, ProfileIdx(1), ProfileIdx(0)), None);
    // What has changed for good is followed.
    bench.sample(a, 0.2, 80);
    assert!((bench.extra(0, 1) - 1.0).abs() < 0.1, "{}", bench.extra(0, 1));
}

#[test]
fn other_gpu_models_are_not_measured() {
    let mut solo = Solo::default();
    (0..4).for_each(|_| solo.learn_alone(1, 0.2));
    assert!(solo.belief(Some(1)).unwrap().is_measured);
    let elsewhere = solo.belief(Some(0)).unwrap();
    assert!(!elsewhere.is_measured && elsewhere.step_s == 0.2 && elsewhere.error >= PROVISIONAL);
    assert!(solo.belief(None).unwrap().is_measured);
}

#[test]
fn kinds_of_work_share_extras_but_not_the_length_of_steps() {
    let mut bench = Bench::new();
    let alike = Profile { kind: Some(ProfileIdx(0)), ..Profile::of_step(1.0).with_unknown_step() };
    let alike = bench.engine.add_profile(alike);
    let a = bench.submit(0);
    bench.sample(a, 0.1, 20);
    let _b = bench.submit(1);
    bench.sample(a, 0.2, 20);
    assert_eq!(bench.extra(alike.0, 1), bench.extra(0, 1));
    assert!(bench.extra(0, 1) > 0.9);
    assert!(!bench.belief(alike.0).is_measured);
}
