//! A model of contention on one GPU, from counters that each task shows when it runs alone.
//!
//! A step is a chain of kernels. Beside a roommate each kernel may have to wait until one of the
//! roommate's kernels lets it in. So a task loses its kernel launches per second, times the length
//! of the roommate's kernels, times how often those fill the GPU:
//!
//! ```text
//! speed_a = kept_a / (1 + Σ_b extra_ab)
//! extra_ab = load_b · (overlap_ab · queue · (λ_a · busy_a^slack) · (busy_b / λ_b)
//!                      · (sm_b / busy_b)^fill
//!                      + memory · dram_a · dram_b)
//! ```
//!
//! - `kept`: the speed on the task's own share of the SMs, from its solo curve.
//! - `λ`: kernel launches, measured by their bus traffic (inputs stay on the GPU); only ratios
//!   matter. `busy / λ` is then the length of a kernel.
//! - `busy^slack`: a task that leaves the GPU idle is limited by its CPU, and waits in time it has
//!   to spare.
//! - `sm / busy`: the share of the GPU that a kernel fills while it runs; a half-empty GPU admits
//!   others.
//! - `overlap`: 1 for tenants on the same SMs, 0 for those confined to disjoint ones.
//! - `load`: the share of time during which a service has work; 1 for training.
//!
//! Two mechanisms change who waits for whom ([`Mechanisms`]). A tenant with priority waits less for
//! one without it, and that one waits for it longer by the same factor. A tenant that is limited to
//! a part of the SMs, without a promise, keeps others waiting less often.
//!
//! Four coefficients are fitted. For tasks that were measured in pairs, two factors each describe
//! how they deviate from what their counters predict ([`Character`]); unmeasured tasks have none.
//!
//! More, heavier or busier roommates never help, and n equal tenants that fill the GPU get 1/n
//! each.

use crate::math::least_squares::minimise;
use crate::math::stat;
use serde::Serialize;

/// A measured task.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
pub struct TaskId(pub u16);

/// Usage of a GPU by a task that runs alone; shares from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Footprint {
    /// Share of time during which any of its kernels runs.
    pub busy: f64,
    /// Mean share of SMs with work.
    pub sm: f64,
    /// Share of the memory bandwidth.
    pub dram: f64,
    /// Kernel launches, as MiB/s of commands over the bus.
    pub launches: f64,
}

/// How a task deviates from what its counters predict, as logarithms of factors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Character {
    /// Factor on its losses to others.
    pub takes: f64,
    /// Factor on the losses of others to it.
    pub gives: f64,
}

/// A tenant as input of the model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guest {
    /// Its usage alone.
    pub footprint: Footprint,
    /// Its deviation from that.
    pub character: Character,
    /// Its speed alone on its SMs.
    pub kept: f64,
    /// Share of the SMs that it is confined to; `None` = not confined.
    pub share: Option<f64>,
    /// Share of time during which it has work.
    pub load: f64,
    /// How it shares beyond that.
    pub rights: Rights,
}

/// What a tenant may do that its share does not say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rights {
    /// Whether its kernels start before those of tenants without priority.
    pub first: bool,
    /// Largest share of the SMs that it may use, without a promise; 1 = all.
    pub most: f64,
    /// Whether it is a service, whose batches are launched at once.
    pub serves: bool,
}

impl Rights {
    /// No priority and no limit.
    pub const PLAIN: Self = Self { first: false, most: 1.0, serves: false };
}

/// What priority and limits of SMs do to the waiting of tenants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mechanisms {
    /// Part of its waiting that is left to a training task with priority.
    pub first_training: f64,
    /// The same for a service: all kernels of a batch are there from its start.
    pub first_service: f64,
    /// Exponent of the share to which a roommate without a promise is limited.
    pub limited: f64,
}

/// Fitted on one H200: the first and the last to six pairs of training tasks under plain MPS, with
/// priority of either kind, and with the roommate limited to 96 or 48 of 132 SMs. The second is
/// read off one service with priority beside two training tasks (`docs/reference/interference.md`).
pub const MECHANISMS: Mechanisms =
    Mechanisms { first_training: 0.62, first_service: 0.32, limited: 1.2 };

impl Mechanisms {
    /// Factor on the waiting of `a` for `b`; exactly 1 while neither has priority nor a limit.
    pub fn factor(&self, a: &Rights, b: &Rights) -> f64 {
        let part = |of: &Rights| if of.serves { self.first_service } else { self.first_training };
        let order = match (a.first, b.first) {
            (true, false) => part(a),
            (false, true) => 1.0 / part(b),
            (true, true) | (false, false) => 1.0,
        };
        let limit = if b.most < 1.0 { b.most.powf(self.limited) } else { 1.0 };
        order * limit
    }

    /// A loss with priority and limits. A measured gain is not made smaller by having priority, nor
    /// larger by lacking it.
    pub fn weigh(&self, extra: f64, a: &Rights, b: &Rights) -> f64 {
        if extra > 0.0 { extra * self.factor(a, b) } else { extra }
    }
}

/// The fitted coefficients.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Coefficients {
    /// Waiting time of a kernel for one that fills the GPU, in lengths of that kernel.
    pub queue: f64,
    /// Exponent of the filled share: how quickly a GPU that is not full admits others.
    pub fill: f64,
    /// Exponent of the busy share of the waiting task.
    pub slack: f64,
    /// Loss to shared memory bandwidth.
    pub memory: f64,
}

/// Lower bound on any speed.
pub const SLOWEST: f64 = 1e-3;
/// Below this many MiB/s of commands, bus traffic says nothing about launches.
const FEWEST_LAUNCHES: f64 = 1.0;

impl Default for Coefficients {
    /// Round numbers near the fit, for use without measured pairs.
    fn default() -> Self {
        Self { queue: 1.0, fill: 3.0, slack: 1.0, memory: 1.0 }
    }
}

impl Coefficients {
    fn from_logs(logs: &[f64]) -> Self {
        let [queue, fill, slack, memory] = std::array::from_fn(|i| logs[i].exp());
        Self { queue, fill, slack, memory }
    }

    fn logs(self) -> [f64; 4] {
        [self.queue, self.fill, self.slack, self.memory].map(f64::ln)
    }

    /// Loss of `a` to `b`, in units of its undisturbed step.
    pub fn extra(&self, a: &Guest, b: &Guest, overlap: f64) -> f64 {
        let (own, other) = (&a.footprint, &b.footprint);
        let queue = if overlap > 0.0 {
            let launches = own.launches.max(FEWEST_LAUNCHES) * own.busy.powf(self.slack);
            let length = other.busy / other.launches.max(FEWEST_LAUNCHES);
            let filled = (other.sm / other.busy.max(1e-9)).clamp(0.0, 1.0).powf(self.fill);
            let character = (a.character.takes + b.character.gives).exp();
            let wait = overlap * self.queue * launches * length * filled * character;
            MECHANISMS.weigh(wait, &a.rights, &b.rights)
        } else {
            0.0
        };
        b.load * (queue + self.memory * own.dram * other.dram)
    }

    /// Speed of one of these tenants, in `(0, 1]`.
    pub fn speed(&self, guests: &[Guest], index: usize) -> f64 {
        let confined: f64 = guests.iter().filter_map(|g| g.share).sum();
        let others = guests.iter().enumerate().filter(|(i, _)| *i != index);
        let a = &guests[index];
        settle(a.kept, others.map(|(_, b)| self.extra(a, b, overlap(a, b, confined))).sum())
    }
}

/// Speed of a tenant with solo speed `kept` and loss `extra` to others.
pub fn settle(kept: f64, extra: f64) -> f64 {
    (kept / (1.0 + extra)).clamp(SLOWEST, 1.0)
}

/// Share of `a`'s SMs that `b` may run on; `confined` is the sum of all confined shares.
pub fn overlap(a: &Guest, b: &Guest, confined: f64) -> f64 {
    match (a.share, b.share) {
        (_, None) => 1.0,
        (None, Some(share)) => share,
        // Partitions are disjoint as long as they fit.
        (Some(_), Some(_)) => (1.0 - 1.0 / confined.max(1.0)).max(0.0),
    }
}

/// The kinds of tasks in a measured pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PairKind {
    /// Two training tasks, each on the whole GPU.
    Trainings,
    /// A training task beside a service, on disjoint SMs.
    Mixed,
}

/// One side of a measured pair.
#[derive(Clone, Debug, PartialEq)]
pub struct Side {
    /// The kind of pair.
    pub kind: PairKind,
    /// Number of the pair; both sides have the same.
    pub pair: usize,
    /// The task that was measured, and its roommate.
    pub tasks: [TaskId; 2],
    /// Both as inputs of the model, without character.
    pub guests: [Guest; 2],
    /// Speed beside the other, 1 = alone on the whole GPU. Values above 1 are noise.
    pub measured: f64,
}

/// The model fitted to measured pairs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fit {
    /// The coefficients.
    pub coefficients: Coefficients,
    /// The character of each task, by task index; zero beyond the end.
    pub characters: Vec<Character>,
}

/// Weight that keeps coefficients near their start where the data do not determine them.
const PRIOR: f64 = 1e-3;
/// The same weight for characters: large enough that one outlier does not create one.
const CHARACTER_PRIOR: f64 = 0.03;

impl Fit {
    /// Fits the coefficients to all sides, then the characters to the residuals.
    pub fn of(sides: &[&Side]) -> Self {
        let coefficients = coefficients(sides);
        Self { coefficients, characters: characters(coefficients, sides) }
    }

    /// The character of a task.
    pub fn character(&self, task: TaskId) -> Character {
        self.characters.get(usize::from(task.0)).copied().unwrap_or_default()
    }

    /// Predicted speed of a side.
    pub fn predict(&self, side: &Side) -> f64 {
        let [mut a, mut b] = side.guests;
        a.character = self.character(side.tasks[0]);
        b.character = self.character(side.tasks[1]);
        self.coefficients.speed(&[a, b], 0)
    }
}

/// A measured speed, limited to its possible range.
fn target(side: &Side) -> f64 {
    side.measured.min(1.0)
}

fn coefficients(sides: &[&Side]) -> Coefficients {
    if sides.is_empty() {
        return Coefficients::default();
    }
    let start = Coefficients::default().logs();
    let found = minimise(&start, |logs| {
        let tried = Coefficients::from_logs(logs);
        let errors = sides.iter().map(|s| tried.speed(&s.guests, 0) - target(s));
        let pull = logs.iter().zip(start).map(|(now, start)| PRIOR.sqrt() * (now - start));
        errors.chain(pull).collect()
    });
    Coefficients::from_logs(&found)
}

fn characters(coefficients: Coefficients, sides: &[&Side]) -> Vec<Character> {
    // On disjoint SMs, characters have no effect.
    let sides: Vec<&Side> =
        sides.iter().copied().filter(|s| s.kind == PairKind::Trainings).collect();
    let tasks = sides.iter().flat_map(|s| s.tasks).map(|t| usize::from(t.0) + 1).max().unwrap_or(0);
    let of = |values: &[f64]| -> Vec<Character> {
        values.chunks_exact(2).map(|v| Character { takes: v[0], gives: v[1] }).collect()
    };
    let found = minimise(&vec![0.0; 2 * tasks], |values| {
        let fit = Fit { coefficients, characters: of(values) };
        let errors = sides.iter().map(|s| fit.predict(s) - target(s));
        errors.chain(values.iter().map(|v| CHARACTER_PRIOR.sqrt() * v)).collect()
    });
    of(&found)
}

/// Errors of predictions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Errors {
    /// Number of predictions.
    pub sides: usize,
    /// Mean absolute error.
    pub mae: f64,
    /// 90th percentile of the absolute error.
    pub p90_abs_error: f64,
}

impl Errors {
    /// From absolute errors.
    pub fn of(errors: impl IntoIterator<Item = f64>) -> Self {
        let mut errors: Vec<f64> = errors.into_iter().collect();
        errors.sort_by(f64::total_cmp);
        Self {
            sides: errors.len(),
            mae: stat::mean(&errors).unwrap_or(0.0),
            p90_abs_error: stat::quantile(&errors, 0.9).unwrap_or(0.0),
        }
    }
}

/// Errors by kind of pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ByPairKind {
    /// Two training tasks.
    pub tt: Errors,
    /// A training task beside a service.
    pub ts: Errors,
    /// Both kinds.
    pub all: Errors,
}

impl ByPairKind {
    /// From absolute errors.
    pub fn of(errors: &[(PairKind, f64)]) -> Self {
        let of = |kind| Errors::of(errors.iter().filter(|(k, _)| *k == kind).map(|(_, e)| *e));
        Self {
            tt: of(PairKind::Trainings),
            ts: of(PairKind::Mixed),
            all: Errors::of(errors.iter().map(|(_, e)| *e)),
        }
    }
}

/// Errors of the model on data that it was not fitted to.
#[derive(Clone, Debug, PartialEq)]
pub struct Validation {
    /// For each task: errors on its pairs after a fit to the pairs without it.
    pub by_task: Vec<(TaskId, Errors)>,
    /// These errors over all tasks.
    pub unseen_tasks: ByPairKind,
    /// Errors on each pair after a fit without it; its tasks were measured in other pairs.
    pub unseen_pairs: ByPairKind,
}

/// Cross-validation: repeats the fit without some of the pairs, and predicts those.
pub fn validate(sides: &[Side]) -> Validation {
    let mut tasks: Vec<TaskId> = sides.iter().flat_map(|s| s.tasks).collect();
    tasks.sort_unstable();
    tasks.dedup();
    let by_task: Vec<_> =
        tasks.iter().map(|t| (*t, held_out(sides, |s| s.tasks.contains(t)))).collect();
    let mut pairs: Vec<usize> = sides.iter().map(|s| s.pair).collect();
    pairs.dedup();
    let by_pair: Vec<_> = pairs.iter().flat_map(|p| held_out(sides, |s| s.pair == *p)).collect();
    let all: Vec<_> = by_task.iter().flat_map(|(_, errors)| errors.iter().copied()).collect();
    let errors = |of: &[(PairKind, f64)]| Errors::of(of.iter().map(|(_, e)| *e));
    Validation {
        by_task: by_task.iter().map(|(task, of)| (*task, errors(of))).collect(),
        unseen_tasks: ByPairKind::of(&all),
        unseen_pairs: ByPairKind::of(&by_pair),
    }
}

/// Absolute errors on some sides of a fit to the others.
fn held_out(sides: &[Side], out: impl Fn(&Side) -> bool) -> Vec<(PairKind, f64)> {
    let rest: Vec<&Side> = sides.iter().filter(|s| !out(s)).collect();
    let fit = Fit::of(&rest);
    let tests = sides.iter().filter(|s| out(s));
    tests.map(|s| (s.kind, (fit.predict(s) - s.measured).abs())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::rng::Rng;

    fn guest(rng: &mut Rng) -> Guest {
        let busy = 0.05 + 0.95 * rng.unit();
        let kept = 0.05 + 0.95 * rng.unit();
        Guest {
            footprint: Footprint {
                busy,
                sm: busy * rng.unit(),
                dram: rng.unit(),
                launches: 200.0 * rng.unit(),
            },
            character: Character { takes: rng.normal(), gives: rng.normal() },
            kept,
            // Four partitions of up to a quarter each always fit.
            share: rng.chance(0.5).then(|| 0.25 * rng.unit()),
            load: rng.unit(),
            rights: Rights::PLAIN,
        }
    }

    #[test]
    fn more_and_heavier_roommates_never_help() {
        let model = Coefficients { queue: 1.3, fill: 3.2, slack: 1.3, memory: 0.6 };
        let mut rng = Rng::new(1);
        for _ in 0..2_000 {
            let four: Vec<Guest> = (0..4).map(|_| guest(&mut rng)).collect();
            let speeds: Vec<f64> = (1..=4).map(|n| model.speed(&four[..n], 0)).collect();
            assert!(speeds.is_sorted_by(|a, b| a >= b), "{four:?} {speeds:?}");
            assert!(speeds.iter().all(|s| *s > 0.0 && *s <= four[0].kept.min(1.0)), "{speeds:?}");
            let heavier = |change: &dyn Fn(&mut Guest)| {
                let mut with = four.clone();
                change(&mut with[1]);
                let slower = model.speed(&with, 0);
                assert!(slower <= speeds[3] + 1e-12, "{four:?} {slower} {speeds:?}");
            };
            heavier(&|g| g.footprint.sm = f64::midpoint(g.footprint.sm, g.footprint.busy));
            heavier(&|g| g.footprint.dram *= 1.5);
            heavier(&|g| g.load = 1.0);
            heavier(&|g| g.share = None);
            // Fewer launches in the same busy time mean longer kernels.
            heavier(&|g| g.footprint.launches /= 2.0);
        }
    }

    #[test]
    fn equals_that_fill_the_gpu_share_it() {
        let footprint = Footprint { busy: 1.0, sm: 1.0, dram: 0.0, launches: 50.0 };
        let one = Guest {
            footprint,
            character: <_>::default(),
            kept: 1.0,
            share: None,
            load: 1.0,
            rights: Rights::PLAIN,
        };
        let model = Coefficients::default();
        for n in 1..=4 {
            assert!((model.speed(&vec![one; n], 0) - 1.0 / n as f64).abs() < 1e-12);
        }
    }

    #[test]
    fn priority_helps_its_owner_and_costs_the_others() {
        let model = Coefficients { queue: 1.3, fill: 3.2, slack: 1.3, memory: 0.6 };
        let mut rng = Rng::new(4);
        for _ in 0..2_000 {
            let mut three: Vec<Guest> = (0..3).map(|_| guest(&mut rng)).collect();
            three.iter_mut().for_each(|g| g.rights.serves = rng.chance(0.3));
            let speeds = |of: &[Guest]| [0, 1, 2].map(|i| model.speed(of, i));
            let plain = speeds(&three);
            let mut first = three.clone();
            first[0].rights.first = true;
            let with = speeds(&first);
            assert!(with[0] >= plain[0] && with[1] <= plain[1] && with[2] <= plain[2]);
            first.iter_mut().for_each(|g| g.rights.first = true);
            assert_eq!(speeds(&first), plain, "priority of all is priority of none");
        }
    }

    #[test]
    fn a_tighter_limit_never_disturbs_others_more() {
        let model = Coefficients { queue: 1.3, fill: 3.2, slack: 1.3, memory: 0.6 };
        let mut rng = Rng::new(5);
        for _ in 0..500 {
            let two = [guest(&mut rng), guest(&mut rng)];
            let beside = |most: f64| {
                let rights = Rights { most, ..Rights::PLAIN };
                model.speed(&[two[0], Guest { rights, ..two[1] }], 0)
            };
            let speeds: Vec<f64> = (1..=20).map(|n| beside(f64::from(n) / 20.0)).collect();
            assert!(speeds.is_sorted_by(|a, b| a >= b), "{speeds:?}");
            assert_eq!(speeds[19], model.speed(&two, 0));
        }
    }

    #[test]
    fn weights_of_mechanisms_by_hand() {
        let first = Rights { first: true, ..Rights::PLAIN };
        let capped = Rights { most: 0.5, ..Rights::PLAIN };
        assert_eq!(MECHANISMS.factor(&first, &Rights::PLAIN), 0.62);
        assert_eq!(MECHANISMS.factor(&Rights::PLAIN, &first), 1.0 / 0.62);
        let service = Rights { serves: true, ..first };
        let both = MECHANISMS.factor(&service, &capped);
        assert!((both - 0.32 * 0.5f64.powf(1.2)).abs() < 1e-12);
        // A pair that was measured faster than alone is noise, and stays as measured.
        assert_eq!(MECHANISMS.weigh(-0.1, &first, &Rights::PLAIN), -0.1);
    }

    #[test]
    fn partitions_disturb_each_other_only_through_memory() {
        let mut rng = Rng::new(2);
        let confined = |rng: &mut Rng, share| Guest { share: Some(share), ..guest(rng) };
        let two = [confined(&mut rng, 0.6), confined(&mut rng, 0.4)];
        let model = Coefficients { memory: 1e-300, ..Coefficients::default() };
        assert_eq!(model.speed(&two, 0), two[0].kept);
        let crowded = [two[0], Guest { share: Some(0.9), ..two[1] }];
        assert!(model.speed(&crowded, 0) < two[0].kept);
    }

    #[test]
    fn a_fit_finds_the_model_that_made_the_data() {
        let truth = Coefficients { queue: 1.4, fill: 2.5, slack: 0.8, memory: 0.7 };
        let mut rng = Rng::new(3);
        let sides: Vec<Side> = (0..200)
            .map(|i| {
                let plain = |g: Guest| Guest { character: Character::default(), ..g };
                let guests = [plain(guest(&mut rng)), plain(guest(&mut rng))];
                Side {
                    kind: PairKind::Trainings,
                    pair: i,
                    tasks: [TaskId(i as u16 % 7), TaskId(i as u16 % 5)],
                    guests,
                    measured: truth.speed(&guests, 0),
                }
            })
            .collect();
        let found = Fit::of(&sides.iter().collect::<Vec<_>>());
        for (found, true_) in found.coefficients.logs().iter().zip(truth.logs()) {
            assert!((found - true_).abs() < 0.05, "{found} {true_}");
        }
        assert!(validate(&sides).unseen_tasks.all.mae < 0.01);
        assert_eq!(Fit::of(&[]).coefficients, Coefficients::default());
    }
}
