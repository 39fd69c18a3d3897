use crate::fuzz::{self, Plan};
use roommate_core::policy::POLICIES;

/// Operations of a try in the tests; `roommate kube fuzz` does a million.
const OPERATIONS: u64 = 4_000;

/// Seeds with which something was wrong before, by policy.
const ONCE_WRONG: [(&str, u64); 4] =
    [("srtf", 22), ("roommate", 48), ("tiresias", 122), ("fifo-backfill", 82)];

#[test]
fn nothing_is_given_away_twice_and_nothing_is_leaked() {
    let mut wrong = Vec::new();
    for entry in POLICIES.iter().filter(|p| !p.is_ablation()) {
        let before = ONCE_WRONG.iter().filter(|(policy, _)| *policy == entry.name);
        for seed in [1, 2].into_iter().chain(before.map(|(_, seed)| *seed)) {
            let plan = Plan { operations: OPERATIONS, seed, policy: entry.name.into() };
            let caught = std::panic::catch_unwind(|| fuzz::run(&plan, &mut |_| {}));
            let said = match caught {
                Ok(Ok(out)) if out.first.is_none() => continue,
                Ok(Ok(out)) => format!("{:?}", out.first),
                Ok(Err(e)) => e,
                Err(_) => "panicked".into(),
            };
            wrong.push(format!("{} seed {seed}: {said}", entry.name));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
