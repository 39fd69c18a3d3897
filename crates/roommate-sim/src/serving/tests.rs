//! Which windows are reported.

use super::*;

const BATCH_S: f64 = 0.008;
const RATE: f64 = 100.0;

/// A service with batch size 1 under constant conditions, and its windows.
struct Watched {
    services: Services,
    now: Time,
    /// Missed windows, reported or not.
    missed: u32,
    reported: Served,
}

impl Watched {
    fn new(slo_s: f64) -> Self {
        let mut services = Services::new(Measuring::default(), 1);
        let slo_us = Some((slo_s * 1e6) as u32);
        let slot = services.add(Time::ZERO, JobIdx(0), Requests::steady(RATE), slo_us, Span::ZERO);
        let times: Vec<f64> = Services::sizes(1).map(|_| BATCH_S).collect();
        let way = Answering { batch: 1, fill_us: 0, times: &times, alone: None };
        services.up(Time::ZERO, slot, &way);
        Self { services, now: Time::ZERO, missed: 0, reported: Served::default() }
    }

    /// Whether the next window is missed, and the sample that is reported.
    fn window(&mut self) -> (bool, Option<Sample>) {
        self.now += Measuring::default().window;
        let mut facts = Vec::new();
        self.services.close_window(self.now, &mut facts);
        let mut reported = None;
        for fact in facts {
            match fact {
                Event::Sampled { sample, .. } => reported = Some(sample),
                Event::Served { served, .. } => self.reported = self.reported.and(served),
                other => panic!("{other:?}"),
            }
        }
        let missed = self.reported.over + self.services.all[0].account.over;
        (std::mem::replace(&mut self.missed, missed) < missed, reported)
    }
}

#[test]
fn repeatedly_missed_windows_are_reported() {
    // An SLO below the batch time cannot be met.
    let mut watched = Watched::new(0.5 * BATCH_S);
    let windows: Vec<(bool, Option<Sample>)> = (0..120).map(|_| watched.window()).collect();
    assert!(windows.iter().all(|(missed, _)| *missed));
    let reported: Vec<usize> = (0..120).filter(|i| windows[*i].1.is_some()).collect();
    let longest = reported.windows(2).map(|w| w[1] - w[0]).max().unwrap();
    assert_eq!(longest, REMIND as usize, "{reported:?}");
    assert!(reported.len() <= 1 + 120 / REMIND as usize, "{reported:?}");
}

#[test]
fn windows_within_the_slo_are_reported_once() {
    let mut watched = Watched::new(1e3 * BATCH_S);
    let windows: Vec<(bool, Option<Sample>)> = (0..120).map(|_| watched.window()).collect();
    assert!(windows.iter().all(|(missed, _)| !missed));
    assert_eq!(windows.iter().filter(|(_, sample)| sample.is_some()).count(), 1);
}

#[test]
fn a_change_of_the_outcome_is_reported_at_once() {
    // An SLO that some windows meet and some miss, by chance.
    let mut watched = Watched::new(8.5 * BATCH_S);
    let (mut kept, mut changes) = (0, 0);
    for _ in 0..600 {
        let over = watched.services.all[0].reported.over;
        let before = watched.services.all[0].reported;
        let (missed, sample) = watched.window();
        kept += u32::from(!missed);
        if missed != over && before.silent + 1 >= before.quiet {
            let sample = sample.expect("a change");
            assert_eq!(f64::from(sample.p99_us) / 1e6 > 8.5 * BATCH_S, missed);
            changes += 1;
        }
    }
    assert!(changes > 3 && kept > 50, "{changes} changes, {kept} kept");
}
