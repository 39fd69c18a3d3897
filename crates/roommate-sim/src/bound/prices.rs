//! Prices of work: what a second of a job's run alone takes at least of a GPU that is shared as
//! well as it can be.
//!
//! Primal: the fastest way to do all work, with any room on any GPU for any time. Its dual gives
//! the prices c of kinds and the rates w of GPU models: Σ speed · c ≤ w for every room, and the
//! mean of w over all GPUs is 1. There are too many rooms for one program, so rows are added where
//! prices break them.

use super::{TENANTS, models};
use roommate_core::idx::{Idx, JobIdx};
use roommate_core::interference::Interference;
use roommate_core::knobs::Knobs;
use roommate_core::math::lp::{Cmp, Lp, Var};
use roommate_core::state::State;
use smallvec::SmallVec;

/// Prices of the kinds of work.
pub(super) struct Prices {
    /// GPU seconds, at the mean rate of the cluster, for a second of work on the reference GPU.
    pub(super) of_kind: Vec<f64>,
}

/// A room with one setting of its knobs: kinds and their speeds, relative to the reference GPU.
struct Room {
    gpu_model: usize,
    speeds: SmallVec<[(usize, f64); TENANTS]>,
}

/// Most kinds of which all rooms are tried: 46,375 rooms.
pub(super) const KINDS: usize = 30;
/// Rows that are added before the program is solved again.
const ROWS: usize = 64;
/// Times that rows are added. Fewer would give prices that are lower than need be, not wrong ones.
const ROUNDS: usize = 200;
/// How far a row is broken before it is added.
const BROKEN: f64 = 1e-7;

impl Prices {
    /// The prices that make this work of each kind most expensive, with up to `most` tenants on a
    /// GPU; without a truth tenants do not disturb each other.
    pub(super) fn new(
        state: &State,
        truth: Option<&dyn Interference>,
        work: &[f64],
        most: usize,
    ) -> Self {
        let rooms = match truth {
            Some(truth) => {
                Rooms { state, truth, most, settings: Settings::that_matter(state, truth) }.all()
            }
            None => (0..work.len()).flat_map(|kind| crowd(state, kind, most)).collect(),
        };
        let gpus: Vec<f64> = (0..state.gpu_models.len() as u8)
            .map(|m| state.gpus.iter().filter(|g| g.gpu_model == m).count() as f64)
            .collect();
        let total: f64 = work.iter().sum();
        let mut lp = Lp::maximize();
        let prices: Vec<Var> =
            work.iter().map(|w| lp.var(w / total.max(1e-9), 0.0, f64::INFINITY)).collect();
        let rates: Vec<Var> = gpus.iter().map(|_| lp.var(0.0, 0.0, f64::INFINITY)).collect();
        let count: f64 = gpus.iter().sum();
        lp.row(rates.iter().copied().zip(gpus.iter().copied()), Cmp::Le, count);
        let add = |lp: &mut Lp, room: &Room| {
            let terms = room.speeds.iter().map(|(kind, speed)| (prices[*kind], *speed));
            lp.row(terms.chain([(rates[room.gpu_model], -1.0)]), Cmp::Le, 0.0);
        };
        rooms.iter().filter(|r| r.speeds.len() == 1).for_each(|room| add(&mut lp, room));
        let mut of_kind = vec![0.0; work.len()];
        for _ in 0..ROUNDS {
            let Some(found) = lp.solve().solution() else { break };
            of_kind = prices.iter().map(|p| found.value(*p).max(0.0)).collect();
            let excess = |r: &Room| r.worth(&of_kind) - found.value(rates[r.gpu_model]);
            let mut broken: Vec<(f64, &Room)> =
                rooms.iter().map(|r| (excess(r), r)).filter(|(by, _)| *by > BROKEN).collect();
            broken.sort_by(|a, b| b.0.total_cmp(&a.0));
            if broken.is_empty() {
                break;
            }
            broken.iter().take(ROWS).for_each(|(_, room)| add(&mut lp, room));
        }
        // The rates that these prices need, whatever the solver took for zero: now no room at all
        // is worth more.
        let mut needed = vec![0.0f64; gpus.len()];
        for room in &rooms {
            needed[room.gpu_model] = needed[room.gpu_model].max(room.worth(&of_kind));
        }
        let rate = needed.iter().zip(&gpus).map(|(rate, n)| rate * n).sum::<f64>() / count;
        if rate > 0.0 {
            of_kind.iter_mut().for_each(|c| *c /= rate);
        }
        Self { of_kind }
    }

    /// What this work of each kind is worth.
    pub(super) fn worth(&self, work: &[f64]) -> f64 {
        self.of_kind.iter().zip(work).map(|(c, w)| c * w).sum()
    }
}

impl Room {
    fn worth(&self, prices: &[f64]) -> f64 {
        self.speeds.iter().map(|(kind, speed)| speed * prices[*kind]).sum()
    }
}

/// A kind of work alone, and `most` times beside itself without a loss.
fn crowd(state: &State, kind: usize, most: usize) -> impl Iterator<Item = Room> + '_ {
    models(state, kind).flat_map(move |(gpu_model, speed)| {
        [1, most].map(|n| Room { gpu_model, speeds: SmallVec::from_elem((kind, speed), n) })
    })
}

/// Knobs by which the tenants of a GPU can share it in other ways than plainly.
#[derive(Clone, Copy)]
struct Settings {
    priority: bool,
    shares: bool,
    stages: bool,
}

/// SM shares are tried in steps of an eighth, and equal ones.
const PARTS: u16 = 8;

impl Settings {
    /// The knobs that change the speed of a pair under this truth; others are not tried in larger
    /// rooms.
    fn that_matter(state: &State, truth: &dyn Interference) -> Self {
        let kinds = state.specs.len();
        let none = Self { priority: false, shares: false, stages: false };
        let matters = |settings: Self| {
            let rooms = Rooms { state, truth, most: 2, settings };
            let pairs = (0..kinds).flat_map(|a| (0..=a).map(move |b| [a, b]));
            pairs
                .into_iter()
                .any(|pair| (0..state.gpu_models.len()).any(|m| rooms.speeds(m, &pair).len() > 1))
        };
        Self {
            priority: matters(Self { priority: true, ..none }),
            shares: matters(Self { shares: true, ..none }),
            stages: matters(Self { stages: true, ..none }),
        }
    }

    /// The knobs of `n` tenants: plain first, then every other setting.
    fn of(self, n: usize) -> Vec<Vec<Knobs>> {
        let mut all = vec![vec![Knobs::WHOLE; n]];
        if self.priority {
            let first = |who: u32, i: usize| Knobs { priority: who >> i & 1 == 1, ..Knobs::WHOLE };
            all.extend((1..(1u32 << n) - 1).map(|who| (0..n).map(|i| first(who, i)).collect()));
        }
        if self.shares && n > 1 {
            let of = |parts: u16| Knobs { sm_permille: parts * 1000 / PARTS, ..Knobs::WHOLE };
            let full = |parts: &Vec<u16>| parts.iter().sum::<u16>() == PARTS;
            let splits = words(n, 1..PARTS).into_iter().filter(full);
            all.extend(splits.map(|parts| parts.into_iter().map(of).collect()));
            all.push(vec![Knobs { sm_permille: Knobs::SM_ALL / n as u16, ..Knobs::WHOLE }; n]);
        }
        if self.stages && n > 1 {
            let of = |offset: u16| Knobs { stage: offset as u8, ..Knobs::WHOLE };
            let apart = |offsets: &Vec<u16>| (0..n).all(|i| !offsets[..i].contains(&offsets[i]));
            let offsets = words(n, 0..TENANTS as u16).into_iter().filter(apart);
            all.extend(offsets.map(|offsets| offsets.into_iter().map(of).collect()));
        }
        all
    }
}

/// All sequences of `n` of these numbers.
fn words(n: usize, of: std::ops::Range<u16>) -> Vec<Vec<u16>> {
    (0..n).fold(vec![Vec::new()], |all, _| {
        let longer = |word: &Vec<u16>| {
            let word = word.clone();
            of.clone().map(move |last| word.iter().copied().chain([last]).collect())
        };
        all.iter().flat_map(longer).collect()
    })
}

/// The rooms of a state with one job of each kind.
struct Rooms<'a> {
    state: &'a State,
    truth: &'a dyn Interference,
    most: usize,
    settings: Settings,
}

impl Rooms<'_> {
    fn all(&self) -> Vec<Room> {
        let mut rooms = Vec::new();
        for gpu_model in 0..self.state.gpu_models.len() {
            let speed = |kind: usize| {
                models(self.state, kind).find(|(m, _)| *m == gpu_model).map(|(_, speed)| speed)
            };
            let alone: Vec<(usize, f64)> =
                (0..self.state.specs.len()).filter_map(|kind| Some((kind, speed(kind)?))).collect();
            let mut chosen = Vec::new();
            self.extend(gpu_model, &alone, &mut chosen, &mut rooms);
        }
        rooms
    }

    /// Adds the rooms that begin with these kinds and go on with `rest`, each as often as wanted.
    fn extend(
        &self,
        gpu_model: usize,
        rest: &[(usize, f64)],
        chosen: &mut Vec<(usize, f64)>,
        rooms: &mut Vec<Room>,
    ) {
        if chosen.len() == self.most {
            return;
        }
        for i in 0..rest.len() {
            chosen.push(rest[i]);
            let kinds: SmallVec<[usize; TENANTS]> = chosen.iter().map(|(kind, _)| *kind).collect();
            for speeds in self.speeds(gpu_model, &kinds) {
                let of = |((kind, alone), speed): (&(usize, f64), f64)| (*kind, alone * speed);
                let speeds = chosen.iter().zip(speeds).map(of).collect();
                rooms.push(Room { gpu_model, speeds });
            }
            self.extend(gpu_model, &rest[i..], chosen, rooms);
            chosen.pop();
        }
    }

    /// The speeds of these tenants under each setting, without repetitions. As in the simulator,
    /// none is faster than alone.
    fn speeds(&self, gpu_model: usize, kinds: &[usize]) -> Vec<SmallVec<[f64; TENANTS]>> {
        let mut found: Vec<SmallVec<[f64; TENANTS]>> = Vec::new();
        for knobs in self.settings.of(kinds.len()) {
            let tenants: SmallVec<[(JobIdx, Knobs); TENANTS]> =
                kinds.iter().map(|k| JobIdx::from_usize(*k)).zip(knobs).collect();
            let speed = |i| self.truth.speed(self.state, gpu_model as u8, &tenants, i).mean;
            let speeds = (0..kinds.len()).map(|i| speed(i).min(1.0)).collect();
            if !found.contains(&speeds) {
                found.push(speeds);
            }
        }
        found
    }
}
