//! Measurements as a live engine gets them: a [`Profile`] for each measured task and batch size,
//! and a table of the pairs that were measured beside each other.
//!
//! Only what was measured is in the table; a policy that packs only known pairs
//! ([`crate::interference::Interference::knows`]) does not act on a fitted guess.

use crate::idx::ProfileIdx;
use crate::interference::table::Table;
use crate::measurement::atlas::{Atlas, Counters, Tenant};
use crate::measurement::contention::TaskId;
use crate::measurement::rows::TaskKind;
use crate::profile::{Predicted, Profile, Profiled};
use std::collections::BTreeMap;

/// Shares of the GPU, permille, at which the latency of a service is handed over.
const LATENCY_SHARES: [u16; 7] = [61, 121, 182, 303, 485, 727, 1000];

/// What is known before the first job arrives.
#[derive(Clone, Debug, PartialEq)]
pub struct KnownProfiles {
    /// Profiles by name, `task@batch`; the index of each is its place here.
    pub profiles: Vec<(String, Profile)>,
    /// Speeds of the pairs of these profiles that were measured.
    pub pairs: Table,
}

impl KnownProfiles {
    /// All tasks of an atlas at all batch sizes at which they were measured.
    pub fn of(atlas: &Atlas) -> Self {
        let works = |kind: TaskKind| {
            let tasks = atlas.tasks().filter(move |(_, k, _)| *k == kind);
            tasks.flat_map(|(task, _, name)| atlas.batches(task).map(move |b| (task, name, b)))
        };
        let training = works(TaskKind::Train).map(|w| (w, false));
        let all: Vec<_> = training.chain(works(TaskKind::Serve).map(|w| (w, true))).collect();
        let named = all.iter().map(|((task, name, batch), serves)| {
            (format!("{name}@{batch}"), profile(atlas, *task, *batch, *serves))
        });
        let works: Vec<(TaskId, u32)> = all.iter().map(|((task, _, b), _)| (*task, *b)).collect();
        Self { profiles: named.collect(), pairs: pairs(atlas, &works) }
    }
}

fn profile(atlas: &Atlas, task: TaskId, batch: u32, serves: bool) -> Profile {
    let Counters { sm_util, dram_util, mem_mib } = atlas.counters(task, batch);
    let predicted = Predicted { sm_util, sm_util_max: sm_util, std: 0.0, dram_util, mem_mib };
    let latency = serves.then(|| latency(atlas, task, batch));
    let step_s = atlas.batch_s(task, batch, None);
    Profile { predicted: Some(predicted), latency, ..Profile::of_step(step_s) }
}

fn latency(atlas: &Atlas, task: TaskId, batch: u32) -> Box<[Profiled]> {
    let point = |sm_permille: u16| {
        let sms = (f64::from(sm_permille) / 1e3 * f64::from(atlas.sms())).round() as u32;
        Profiled { batch, sm_permille, seconds: atlas.batch_s(task, batch, Some(sms)) }
    };
    LATENCY_SHARES.map(point).into()
}

/// Speeds of measured pairs on the whole GPU. A pair that is not there stands still, so that a
/// policy which asks for its speed without asking whether it is known does not choose it.
fn pairs(atlas: &Atlas, works: &[(TaskId, u32)]) -> Table {
    let tenant = |(task, batch): (TaskId, u32)| Tenant::plain(task, batch);
    let mut known = BTreeMap::new();
    for (i, a) in works.iter().enumerate() {
        for (j, b) in works.iter().enumerate().skip(i) {
            let tenants = [tenant(*a), tenant(*b)];
            if atlas.has_met(tenants[0], tenants[1]) && atlas.has_met(tenants[1], tenants[0]) {
                let speeds = [atlas.speed(&tenants, 0), atlas.speed(&tenants, 1)];
                known.insert((ProfileIdx(i as u32), ProfileIdx(j as u32)), speeds);
            }
        }
    }
    Table::new(known, 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measurement::rows;

    const ROWS: &str = r#"
        {"kind":"train","name":"a","batch":8,"sms":132,"mem_mib":100,"it_s":10.0,"n":9}
        {"kind":"train","name":"a","batch":16,"sms":132,"mem_mib":150,"it_s":8.0,"n":9}
        {"kind":"train","name":"b","batch":4,"sms":132,"mem_mib":50,"it_s":20.0,"n":9}
        {"k":"tt","a":"a","batch_a":8,"b":"b","batch_b":4,"ra":{"it_s":6.0,"n":9},"rb":{"it_s":16.0,"n":9}}
    "#;

    fn known() -> KnownProfiles {
        let lines = ROWS.trim().lines().map(str::trim).collect::<Vec<_>>().join("\n");
        KnownProfiles::of(&Atlas::new(&[rows::parse(&lines).unwrap()]).unwrap())
    }

    #[test]
    fn every_measured_batch_size_is_a_profile() {
        let names: Vec<String> = known().profiles.into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["a@8", "a@16", "b@4"]);
    }

    #[test]
    fn a_profile_has_the_measured_step_and_memory() {
        let (_, profile) = &known().profiles[1];
        assert!((profile.step_s - 1.0 / 8.0).abs() < 1e-9);
        assert_eq!(profile.predicted.unwrap().mem_mib, 150);
    }

    #[test]
    fn only_measured_pairs_have_a_speed() {
        let speed = |a, b| known().pairs.speed_of(ProfileIdx(a), ProfileIdx(b));
        assert!((speed(0, 2) - 0.6).abs() < 1e-9 && (speed(2, 0) - 0.8).abs() < 1e-9);
        assert_eq!((speed(1, 2), speed(0, 0)), (0.0, 0.0));
    }
}
