//! What is told of windows.

use super::*;

const BATCH_S: f64 = 0.008;
const RATE: f64 = 100.0;

/// A service that answers requests one by one under conditions that never change, and its windows.
struct Watched {
    services: Services,
    now: Time,
    /// Windows that were missed, told or not.
    missed: u32,
    told: Served,
}

impl Watched {
    fn new(slo_s: f64) -> Self {
        let mut services = Services::new(Measuring::default(), 1);
        let slo_us = Some((slo_s * 1e6) as u32);
        let slot = services.add(Time::ZERO, JobIdx(0), Requests::steady(RATE), slo_us, Span::ZERO);
        services.up(Time::ZERO, slot, 1, Services::sizes(1).map(|_| BATCH_S));
        Self { services, now: Time::ZERO, missed: 0, told: Served::default() }
    }

    /// Whether the next window is missed, and what is told of it.
    fn window(&mut self) -> (bool, Option<Sample>) {
        self.now += Measuring::default().window;
        let mut facts = Vec::new();
        self.services.close_window(self.now, &mut facts);
        let mut said = None;
        for fact in facts {
            match fact {
                Event::Sampled { sample, .. } => said = Some(sample),
                Event::Served { served, .. } => self.told = self.told.and(served),
                other => panic!("{other:?}"),
            }
        }
        let missed = self.told.over + self.services.all[0].account.over;
        (std::mem::replace(&mut self.missed, missed) < missed, said)
    }
}

#[test]
fn windows_that_go_on_being_missed_are_told() {
    // Faster than a batch takes nobody answers.
    let mut watched = Watched::new(0.5 * BATCH_S);
    let windows: Vec<(bool, Option<Sample>)> = (0..120).map(|_| watched.window()).collect();
    assert!(windows.iter().all(|(missed, _)| *missed));
    let told: Vec<usize> = (0..120).filter(|i| windows[*i].1.is_some()).collect();
    let longest = told.windows(2).map(|w| w[1] - w[0]).max().unwrap();
    assert_eq!(longest, REMIND as usize, "{told:?}");
    assert!(told.len() <= 1 + 120 / REMIND as usize, "{told:?}");
}

#[test]
fn windows_that_are_kept_are_told_once() {
    let mut watched = Watched::new(1e3 * BATCH_S);
    let windows: Vec<(bool, Option<Sample>)> = (0..120).map(|_| watched.window()).collect();
    assert!(windows.iter().all(|(missed, _)| !missed));
    assert_eq!(windows.iter().filter(|(_, said)| said.is_some()).count(), 1);
}

#[test]
fn a_turn_is_told_at_once() {
    // An objective that chance decides about.
    let mut watched = Watched::new(8.5 * BATCH_S);
    let (mut kept, mut turns) = (0, 0);
    for _ in 0..600 {
        let over = watched.services.all[0].told.over;
        let heeds = watched.services.all[0].told;
        let (missed, said) = watched.window();
        kept += u32::from(!missed);
        if missed != over && heeds.silent + 1 >= heeds.quiet {
            let said = said.expect("a turn");
            assert_eq!(f64::from(said.p99_us) / 1e6 > 8.5 * BATCH_S, missed);
            turns += 1;
        }
    }
    assert!(turns > 3 && kept > 50, "{turns} turns, {kept} kept");
}
