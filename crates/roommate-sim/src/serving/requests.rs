//! Arrival processes of the requests to a service: Poisson or bursty at a rate that changes at
//! given times, or recorded arrival times.

use roommate_core::math::rng::Rng;
use std::sync::Arc;

/// The requests of one service; times are seconds after its submission.
#[derive(Clone, Debug, PartialEq)]
pub enum Requests {
    /// Random arrivals at a rate that is constant from each of these times to the next.
    Rates {
        /// Start of each rate, and mean requests per second from then on; ascending from 0.
        rates: Arc<[(f64, f64)]>,
        /// `None`: Poisson arrivals. Otherwise two rates that alternate at random.
        bursts: Option<Bursts>,
    },
    /// Recorded arrivals, repeated when they end.
    Times {
        /// Arrival times, ascending.
        times: Arc<[f64]>,
        /// After how many seconds the arrivals repeat; not before the last arrival.
        period_s: f64,
    },
}

/// A Markov-modulated Poisson process with two rates (MMPP-2): bursts, and calm periods between
/// them. It does not change the mean rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bursts {
    /// Rate in a burst ÷ rate between bursts, at least 1.
    pub times: f64,
    /// Mean seconds of a burst.
    pub burst_s: f64,
    /// Mean seconds between bursts.
    pub calm_s: f64,
}

impl Requests {
    /// A constant rate.
    pub fn steady(rps: f64) -> Self {
        Self::Rates { rates: Arc::new([(0.0, rps)]), bursts: None }
    }

    /// The rate at a time, and the time of its next change.
    pub(super) fn rate(&self, since_s: f64) -> (f64, Option<f64>) {
        match self {
            Self::Rates { rates, .. } => {
                let next = rates.partition_point(|r| r.0 <= since_s);
                let now = next.checked_sub(1).map_or(0.0, |i| rates[i].1);
                (now, rates.get(next).map(|r| r.0))
            }
            Self::Times { times, period_s } => (times.len() as f64 / period_s, None),
        }
    }

    pub(super) fn bursts(&self) -> Option<Bursts> {
        if let Self::Rates { bursts, .. } = self { *bursts } else { None }
    }
}

impl Bursts {
    /// Rate between bursts ÷ mean rate.
    fn calm_factor(&self) -> f64 {
        (self.burst_s + self.calm_s) / (self.times * self.burst_s + self.calm_s)
    }
}

/// Draws arrival times one after the other.
#[derive(Clone, Debug)]
pub(super) struct Source {
    rng: Rng,
    /// Time of the next request, in seconds of the run; infinite while the rate is 0.
    next: f64,
    process: Process,
}

#[derive(Clone, Debug)]
enum Process {
    Poisson { gap_s: f64 },
    Bursts { bursts: Bursts, rate: f64, bursting: bool, until: f64 },
    Times { times: Arc<[f64]>, period_s: f64, origin: f64, at: usize },
}

impl Source {
    /// Arrivals from `now` on at a service that was submitted at `origin`.
    pub(super) fn new(requests: &Requests, origin: f64, now: f64, mut rng: Rng) -> Self {
        let (rate, _) = requests.rate(now - origin);
        let process = match requests {
            Requests::Rates { bursts: None, .. } => Process::Poisson { gap_s: 0.0 },
            Requests::Rates { bursts: Some(bursts), .. } => {
                let bursting = rng.chance(bursts.burst_s / (bursts.burst_s + bursts.calm_s));
                let mean = if bursting { bursts.burst_s } else { bursts.calm_s };
                let until = now + rng.exp(mean);
                Process::Bursts { bursts: *bursts, rate: 0.0, bursting, until }
            }
            Requests::Times { times, period_s } => {
                let origin = origin + ((now - origin) / period_s).floor() * period_s;
                let at = times.partition_point(|t| origin + t < now);
                Process::Times { times: Arc::clone(times), period_s: *period_s, origin, at }
            }
        };
        let mut source = Self { rng, next: f64::INFINITY, process };
        source.set_rate(now, rate);
        source
    }

    /// Sets the mean rate from `now` on; recorded arrivals are not affected.
    pub(super) fn set_rate(&mut self, now: f64, new: f64) {
        match &mut self.process {
            Process::Poisson { gap_s } => *gap_s = 1.0 / new,
            Process::Bursts { rate, .. } => *rate = new,
            Process::Times { .. } => {}
        }
        self.next = self.after(now);
    }

    /// Time of the next request.
    pub(super) fn peek(&self) -> f64 {
        self.next
    }

    /// Takes the next request.
    pub(super) fn take(&mut self) -> f64 {
        let taken = self.next;
        self.next = self.after(taken);
        taken
    }

    fn after(&mut self, now: f64) -> f64 {
        match &mut self.process {
            Process::Poisson { gap_s } if gap_s.is_finite() => now + self.rng.exp(*gap_s),
            Process::Poisson { .. } => f64::INFINITY,
            Process::Bursts { rate, .. } if *rate <= 0.0 => f64::INFINITY,
            Process::Bursts { bursts, rate, bursting, until } => {
                let mut now = now;
                loop {
                    let calm = *rate * bursts.calm_factor();
                    let rate = if *bursting { calm * bursts.times } else { calm };
                    let at = now + self.rng.exp(1.0 / rate);
                    if at <= *until {
                        return at;
                    }
                    now = now.max(*until);
                    *bursting = !*bursting;
                    let mean = if *bursting { bursts.burst_s } else { bursts.calm_s };
                    *until = now + self.rng.exp(mean);
                }
            }
            Process::Times { times, .. } if times.is_empty() => f64::INFINITY,
            Process::Times { times, period_s, origin, at } => {
                if *at == times.len() {
                    (*at, *origin) = (0, *origin + *period_s);
                }
                *at += 1;
                *origin + times[*at - 1]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(requests: &Requests, until: f64) -> Vec<f64> {
        let mut source = Source::new(requests, 0.0, 0.0, Rng::stream(1, 110));
        std::iter::from_fn(|| (source.peek() < until).then(|| source.take())).collect()
    }

    #[test]
    fn arrivals_have_the_mean_rate_with_and_without_bursts() {
        let bursts = Bursts { times: 8.0, burst_s: 2.0, calm_s: 6.0 };
        let rates = Arc::new([(0.0, 50.0)]);
        let bursty = Requests::Rates { rates, bursts: Some(bursts) };
        // Variance ÷ mean of the counts in a second: 1 without bursts.
        let dispersion = |times: &[f64]| {
            let mut counts = vec![0.0; 4_000];
            times.iter().for_each(|t| counts[*t as usize] += 1.0);
            let mean = counts.iter().sum::<f64>() / 4_000.0;
            counts.iter().map(|c: &f64| (c - mean).powi(2)).sum::<f64>() / 4_000.0 / mean
        };
        for (requests, least, most) in [(Requests::steady(50.0), 0.9, 1.1), (bursty, 10.0, 60.0)] {
            let times = drawn(&requests, 4_000.0);
            assert!(times.is_sorted());
            let rate = times.len() as f64 / 4_000.0;
            assert!((rate - 50.0).abs() < 2.5, "{rate}");
            let spread = dispersion(&times);
            assert!((least..most).contains(&spread), "{spread}");
        }
    }

    #[test]
    fn recorded_arrivals_repeat_after_the_period() {
        let times = Requests::Times { times: Arc::new([0.5, 2.0]), period_s: 3.0 };
        assert_eq!(drawn(&times, 7.0), [0.5, 2.0, 3.5, 5.0, 6.5]);
        let late = Source::new(&times, 10.0, 14.0, Rng::new(0));
        assert_eq!(late.peek(), 15.0);
    }

    #[test]
    fn a_rate_holds_from_its_start_to_the_next() {
        let rates = Arc::new([(0.0, 10.0), (5.0, 0.0), (8.0, 20.0)]);
        let requests = Requests::Rates { rates, bursts: None };
        assert_eq!(requests.rate(4.9), (10.0, Some(5.0)));
        assert_eq!(requests.rate(5.0), (0.0, Some(8.0)));
        assert_eq!(requests.rate(99.0), (20.0, None));
        let mut none = Source::new(&requests, 0.0, 6.0, Rng::new(0));
        assert_eq!(none.peek(), f64::INFINITY);
        none.set_rate(8.0, 20.0);
        assert!(none.peek() < 9.0);
    }
}
