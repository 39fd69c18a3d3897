//! A second call changes nothing where sharing GPUs has a cost that depends on the pair and from
//! some time on exceeds its gain: with measurements that the other runs do not have.

use crate::random::{self, CaseOptions};
use roommate_core::idx::JobIdx;
use roommate_core::interference::{Estimate, Interference, Truth};
use roommate_core::knobs::Knobs;
use roommate_core::math::rng::Rng;
use roommate_core::policy::POLICIES;
use roommate_core::state::State;
use std::sync::Arc;

/// Speeds of three profiles beside each other.
struct Fickle([[f64; 3]; 3]);

impl Truth for Fickle {}

impl Interference for Fickle {
    fn speed(&self, state: &State, _: u8, tenants: &[(JobIdx, Knobs)], index: usize) -> Estimate {
        let profile = |i: usize| state.spec(tenants[i].0).profile.0 as usize;
        let others = (0..tenants.len()).filter(|i| *i != index);
        let speed: f64 = others.map(|i| self.0[profile(index)][profile(i)]).product();
        let worse = tenants.len() > 1 && state.now.secs() >= 30.0;
        Estimate::certain(if worse { speed * 0.2 } else { speed })
    }
}

#[test]
fn a_second_look_changes_nothing_whatever_sharing_does() {
    let (mut shared, mut grown) = (0, 0);
    for entry in POLICIES {
        for seed in 0..250 {
            let mut case = random::case(seed, entry, CaseOptions::WILD);
            let mut rng = Rng::stream(seed, 82);
            let mut speed = || 0.3 + 0.7 * rng.unit();
            let speeds = std::array::from_fn(|_| std::array::from_fn(|_| speed()));
            case.truth = Arc::new(Fickle(speeds));
            let plain = case.run();
            let looked = case.run_looking(&mut |engine| {
                let again = engine.look_again();
                assert!(again.actions.is_empty(), "{}", random::compact(&case));
            });
            assert!(plain.ended && looked.ended, "{}", random::compact(&case));
            assert_eq!(plain.finished, looked.finished, "{}", random::compact(&case));
            shared += usize::from(plain.chart().contains('#'));
            grown += usize::from(plain.journal.contains(r#""grows":"#));
        }
    }
    assert!(shared > 100, "only {shared} cases in which jobs share");
    assert!(grown > 50, "only {grown} cases in which a job grows");
}
