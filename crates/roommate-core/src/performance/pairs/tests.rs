use super::*;
use crate::engine::Engine;
use crate::event::Event;
use crate::idx::GpuIdx;
use crate::interference::Undisturbed;
use crate::job::Spec;
use crate::number::Number;
use crate::policy::{self, Params};
use crate::profile::Profile;
use crate::state::Costs;
use crate::time::Time;

#[test]
fn a_given_pair_counts_until_a_sample_says_otherwise() {
    let [a, b, c] = [0, 1, 2].map(ProfileIdx);
    let mps = policy::find("mps").unwrap().build(&Params::new()).unwrap();
    let cluster = "1x1".parse().unwrap();
    let mut engine = Engine::new(&cluster, Costs::default(), mps, Box::new(Undisturbed), 0);
    let given = Table::by_gpu_model(BTreeMap::from([((0, a, b), [0.5, 0.8])]));
    engine.know_pairs(Some(given));
    for _ in 0..3 {
        engine.add_profile(Profile::of_step(1.0));
    }
    let extra = |engine: &Engine, own, other| extra(engine.state(), 0, own, other);
    assert_eq!((extra(&engine, a, b), extra(&engine, b, a)), (1.0, 0.25));
    // What the table does not have is predicted.
    let unknown = extra(&engine, a, c);
    assert!(unknown > 0.0 && unknown < 1.0, "{unknown}");
    let job = engine.add_job(Spec::training(1, 100.0, a));
    let other = engine.add_job(Spec::training(1, 100.0, b));
    let arrive = [Event::Submitted(job), Event::Submitted(other)];
    engine.step(Time::ZERO, &arrive);
    assert_eq!(engine.state().gpu(GpuIdx(0)).tenants.len(), 2);
    engine.step(Time::ZERO, &[Event::Started(job), Event::Started(other)]);
    let version = engine.state().pairs.version();
    let sample = Sample { step_s: Number::of(1.5), ..Sample::default() };
    engine.step(Time::from_secs(10.0), &[Event::Sampled { job, sample }]);
    assert_eq!((extra(&engine, a, b), extra(&engine, b, a)), (0.5, 0.25));
    assert!(engine.state().pairs.version() > version);
}
