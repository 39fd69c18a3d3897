//! Which devices may be offered: one that cannot be used is not offered from then on, and is
//! offered again once it could be used for a while, so that one that comes and goes does not.

use super::kubelet::{Device, HEALTHY, UNHEALTHY};
use roommate_core::idx::GpuIdx;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// How often devices are looked at.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long one has to be usable until it is offered again.
const WELL_FOR: Duration = Duration::from_secs(10);

/// What has become of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// It cannot be used, and why.
    Lost(u16, String),
    /// It can be used again.
    Back(u16),
}

/// The devices that are not offered.
#[derive(Debug, Default)]
pub(super) struct Health {
    lost: BTreeMap<u16, Lost>,
    looked: Option<Instant>,
}

#[derive(Debug)]
struct Lost {
    why: String,
    /// Since when it can be used again.
    well: Option<Instant>,
}

impl Health {
    /// Whether it is time to look.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        let due = self.looked.is_none_or(|at| now.duration_since(at) >= LOOK_EVERY);
        if due {
            self.looked = Some(now);
        }
        due
    }

    /// Takes in which devices cannot be used now; returns what has changed.
    pub(super) fn look(&mut self, found: &[(GpuIdx, String)], now: Instant) -> Vec<Change> {
        let mut changes = Vec::new();
        for (gpu, why) in found {
            let number = gpu.0 as u16;
            let known = self.lost.get_mut(&number);
            if known.map(|lost| lost.well = None).is_none() {
                self.lost.insert(number, Lost { why: why.clone(), well: None });
                changes.push(Change::Lost(number, why.clone()));
            }
        }
        let is_found = |number: u16| found.iter().any(|(gpu, _)| gpu.0 == u32::from(number));
        self.lost.retain(|number, lost| {
            if is_found(*number) {
                return true;
            }
            let back = now.duration_since(*lost.well.get_or_insert(now)) >= WELL_FOR;
            if back {
                changes.push(Change::Back(*number));
            }
            !back
        });
        changes
    }

    /// Why devices are not offered, by number.
    pub(super) fn lost(&self) -> BTreeMap<u16, &str> {
        self.lost.iter().map(|(number, lost)| (*number, lost.why.as_str())).collect()
    }
}

/// The places that the kubelet is offered: `slots` for each device. Of a device that is lost none
/// is healthy. A place is a ticket for any device, so those are taken that pods on lost devices
/// hold, and then some that nobody has; `held` are the places of pods with the devices of each.
pub(super) fn places(
    devices: u16,
    slots: u32,
    lost: &BTreeSet<u16>,
    held: &[(Vec<String>, Vec<u16>)],
) -> Vec<Device> {
    let all: Vec<String> = (0..u32::from(devices) * slots).map(|n| format!("place-{n}")).collect();
    let of_lost = held.iter().flat_map(|(places, on)| {
        let many = on.iter().filter(|number| lost.contains(*number)).count();
        places.iter().take(many)
    });
    let taken: BTreeSet<&String> = held.iter().flat_map(|(places, _)| places).collect();
    let free = all.iter().rev().filter(|place| !taken.contains(place));
    let gone: BTreeSet<&String> = of_lost.chain(free).take(lost.len() * slots as usize).collect();
    let health = |id: &String| if gone.contains(id) { UNHEALTHY } else { HEALTHY };
    all.iter().map(|id| Device { id: id.clone(), health: health(id).into() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_back_once_it_was_well_for_a_while() {
        let (mut health, now) = (Health::default(), Instant::now());
        let at = |s: u64| now + Duration::from_secs(s);
        let ill = [(GpuIdx(1), "core 1 is offline".to_string())];
        assert_eq!(health.look(&[], now), []);
        assert_eq!(health.look(&ill, now), [Change::Lost(1, ill[0].1.clone())]);
        assert_eq!(health.look(&ill, at(1)), []);
        assert_eq!(health.lost(), [(1, "core 1 is offline")].into());
        assert_eq!(health.look(&[], at(2)), []);
        // It comes and goes.
        assert_eq!(health.look(&ill, at(3)), []);
        assert_eq!(health.look(&[], at(4)), []);
        assert_eq!(health.look(&[], at(13)), []);
        assert_eq!(health.look(&[], at(14)), [Change::Back(1)]);
        assert!(health.lost().is_empty());
    }

    #[test]
    fn places_of_a_lost_device_are_those_of_its_pods_first() {
        let place = |n: u32| format!("place-{n}");
        let held = [(vec![place(0)], vec![1]), (vec![place(3)], vec![0])];
        let healthy = |lost: &[u16]| -> Vec<String> {
            let found = places(2, 2, &lost.iter().copied().collect(), &held);
            found.into_iter().filter(|d| d.health == HEALTHY).map(|d| d.id).collect()
        };
        assert_eq!(healthy(&[]).len(), 4);
        assert_eq!(healthy(&[1]), [place(1), place(3)]);
        assert_eq!(healthy(&[0]), [place(0), place(1)]);
        assert_eq!(healthy(&[0, 1]), Vec::<String>::new());
    }
}
