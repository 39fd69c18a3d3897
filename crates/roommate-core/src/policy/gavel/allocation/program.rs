//! Objectives as programs.
//!
//! If jobs are coupled only by the number of GPUs, the program has a shape that
//! [`crate::math::conic`] solves in time linear in the jobs; the solution is the centre of all
//! optimal ones ([`central`]). With pairs or deadlines it is a general linear program, whose
//! solution is a corner with few non-zero rows. Jobs with the same demand are one class, so that
//! the size of the program depends on the number of classes.

use crate::math::lp::{Cmp, Lp, Solution, Var};
pub(crate) use crate::policy::gavel::allocation::central::ModelSet;
use crate::policy::gavel::allocation::{
    Allocation, ByGpuModel, Claim, Market, Pair, Unsolved, central, effective,
};
use std::collections::BTreeMap;

/// Goal of a job: an effective speed of at least `floor + need · q` for the largest possible q.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Goal {
    /// Steps per second for each unit of q.
    pub(crate) need: f64,
    /// Steps per second in any case.
    pub(crate) floor: f64,
}

impl Goal {
    /// A goal without a floor.
    pub(crate) fn of(need: f64) -> Self {
        Self { need, floor: 0.0 }
    }
}

/// Jobs with the same demand and goal.
#[derive(Clone, Debug)]
pub(super) struct Class {
    pub(super) members: Vec<usize>,
    /// Speed on each GPU model relative to the fastest; 0 where it cannot run.
    pub(super) pace: ByGpuModel,
    /// Steps per second on the fastest GPU model.
    pub(super) fastest: f64,
    pub(super) gpus: f64,
    pub(super) goal: Goal,
}

impl Class {
    pub(super) fn count(&self) -> f64 {
        self.members.len() as f64
    }
}

/// Classes of all jobs that can run at all.
pub(super) fn classes(market: &Market, goals: &[Goal]) -> Vec<Class> {
    let mut found: BTreeMap<Vec<u64>, usize> = BTreeMap::new();
    let mut classes: Vec<Class> = Vec::new();
    for (m, (claim, goal)) in market.claims.iter().zip(goals).enumerate() {
        let fits = |(t, n): (&f64, &f64)| if claim.gpus <= *n { *t } else { 0.0 };
        let speed: ByGpuModel = claim.speed.iter().zip(&market.gpus).map(fits).collect();
        let fastest = speed.iter().copied().fold(0.0, f64::max);
        if fastest <= 0.0 || !fastest.is_finite() {
            continue;
        }
        let mut key: Vec<u64> = speed.iter().map(|t| t.to_bits()).collect();
        key.extend([claim.gpus, goal.need, goal.floor].map(f64::to_bits));
        let at = *found.entry(key).or_insert_with(|| {
            let pace = speed.iter().map(|t| t / fastest).collect();
            let members = Vec::new();
            classes.push(Class { members, pace, fastest, gpus: claim.gpus, goal: *goal });
            classes.len() - 1
        });
        classes[at].members.push(m);
    }
    classes
}

/// Speeds of two jobs (by index) beside each other on a GPU model, in steps per second.
pub(crate) type PairSpeed<'a> = &'a dyn Fn(usize, usize, usize) -> [f64; 2];

/// A program over the fractions of classes.
struct Program {
    lp: Lp,
    classes: Vec<Class>,
    /// Fraction of the time alone, by class and GPU model; `None` where the class cannot run.
    alone: Vec<Vec<Option<Var>>>,
    /// Two classes that share GPUs of one model, and the time that all their pairs spend there.
    together: Vec<(usize, usize, usize, Var)>,
    /// Speed from sharing, by class: the variable, and the relative speed of a member beside the
    /// other class, for all members together.
    gains: Vec<Vec<(Var, f64)>>,
}

impl Program {
    /// The constraints of every objective: no job runs more than all of its time, no GPU model is
    /// used beyond its GPUs. `worth` is the coefficient of the objective for the time of a class on
    /// a GPU model.
    fn new(
        market: &Market,
        goals: &[Goal],
        pairs: Option<PairSpeed<'_>>,
        worth: &dyn Fn(&Class, usize) -> f64,
    ) -> Self {
        let classes = classes(market, goals);
        let mut lp = Lp::maximize();
        let gpu_models = market.gpus.len();
        let mut alone = Vec::with_capacity(classes.len());
        for class in &classes {
            let var = |k: usize| (class.pace[k] > 0.0).then(|| lp.var(worth(class, k), 0.0, 1.0));
            alone.push((0..gpu_models).map(var).collect::<Vec<_>>());
        }
        let gains = vec![Vec::new(); classes.len()];
        let mut program = Self { lp, classes, alone, together: Vec::new(), gains };
        if let Some(speed) = pairs {
            program.add_pairs(gpu_models, speed, worth);
        }
        program.limit_time();
        program.limit_gpus(market);
        program
    }

    /// Adds variables for classes of equal width that may share GPUs.
    fn add_pairs(
        &mut self,
        gpu_models: usize,
        speed: PairSpeed<'_>,
        worth: &dyn Fn(&Class, usize) -> f64,
    ) {
        for c in 0..self.classes.len() {
            for d in c..self.classes.len() {
                let (a, b) = (&self.classes[c], &self.classes[d]);
                if a.gpus != b.gpus || (c == d && a.members.len() < 2) {
                    continue;
                }
                let second = if c == d { a.members[1] } else { b.members[0] };
                let first = a.members[0];
                for k in (0..gpu_models).filter(|k| a.pace[*k] > 0.0 && b.pace[*k] > 0.0) {
                    let [x, y] = speed(first, second, k);
                    if x <= 0.0 || y <= 0.0 {
                        continue;
                    }
                    // What a step of one member adds to the objective, whichever job is beside it.
                    let step = |c: &Class| worth(c, k) / (c.count() * c.pace[k] * c.fastest);
                    let var = self.lp.var(step(a) * x + step(b) * y, 0.0, f64::INFINITY);
                    self.together.push((c, d, k, var));
                    self.gains[c].push((var, x / a.fastest));
                    self.gains[d].push((var, y / b.fastest));
                }
            }
        }
    }

    fn limit_time(&mut self) {
        for (c, class) in self.classes.iter().enumerate() {
            let alone = self.alone[c].iter().flatten().map(|v| (*v, class.count()));
            let shared = self.gains[c].iter().map(|(v, _)| (*v, 1.0));
            self.lp.row(alone.chain(shared), Cmp::Le, class.count());
        }
    }

    fn limit_gpus(&mut self, market: &Market) {
        for (k, gpus) in market.gpus.iter().enumerate() {
            let alone = self.alone.iter().zip(&self.classes);
            let alone = alone.filter_map(|(v, c)| Some((v[k]?, c.gpus * c.count())));
            let shared = self.together.iter().filter(|p| p.2 == k);
            let shared = shared.map(|(c, _, _, v)| (*v, self.classes[*c].gpus));
            self.lp.row(alone.chain(shared), Cmp::Le, *gpus);
        }
    }

    /// Terms of the mean effective speed of a class relative to its fastest, times its members.
    fn speed_of(&self, c: usize) -> impl Iterator<Item = (Var, f64)> {
        let class = &self.classes[c];
        let alone = self.alone[c].iter().zip(&class.pace);
        let alone = alone.filter_map(|(v, pace)| Some(((*v)?, pace * class.count())));
        alone.chain(self.gains[c].iter().copied())
    }

    fn solve(&self, market: &Market) -> Result<(Allocation, Solution), Unsolved> {
        let solution = self.lp.solve().solution().ok_or(Unsolved)?;
        let none = ByGpuModel::from_elem(0.0, market.gpus.len());
        let mut alone = vec![none; market.claims.len()];
        let part = |v: &Option<Var>| v.map_or(0.0, |v| solution.value(v).clamp(0.0, 1.0));
        for (vars, class) in self.alone.iter().zip(&self.classes) {
            let row: ByGpuModel = vars.iter().map(part).collect();
            for m in &class.members {
                alone[*m].clone_from(&row);
            }
        }
        let mut pairs: BTreeMap<[usize; 2], ByGpuModel> = BTreeMap::new();
        for (c, d, k, var) in &self.together {
            let time = solution.value(*var);
            if time > 1e-7 {
                for (members, share) in deal(&self.classes[*c], &self.classes[*d], c == d, time) {
                    let none = || ByGpuModel::from_elem(0.0, market.gpus.len());
                    pairs.entry(members).or_insert_with(none)[*k] += share;
                }
            }
        }
        let pairs = pairs.into_iter().map(|(members, share)| Pair { members, share }).collect();
        let value = solution.objective;
        Ok((Allocation { alone, pairs, value, ..Allocation::default() }, solution))
    }
}

/// Divides the time that two classes spend together among pairs of jobs, so that all members of a
/// class get the same time and few pairs are needed.
fn deal(a: &Class, b: &Class, same: bool, time: f64) -> Vec<([usize; 2], f64)> {
    let pair = |x: usize, y: usize| [x.min(y), x.max(y)];
    if same && a.members.len() == 2 {
        return vec![(pair(a.members[0], a.members[1]), time)];
    }
    if same {
        // A ring: each job with its two neighbours.
        let next = a.members.iter().cycle().skip(1);
        let each = time / a.count();
        return a.members.iter().zip(next).map(|(x, y)| (pair(*x, *y), each)).collect();
    }
    let mut dealt = Vec::new();
    let (each_a, each_b) = (time / a.count(), time / b.count());
    let (mut i, mut j, mut left_a, mut left_b) = (0, 0, each_a, each_b);
    while i < a.members.len() && j < b.members.len() {
        let share = left_a.min(left_b);
        dealt.push((pair(a.members[i], b.members[j]), share));
        left_a -= share;
        left_b -= share;
        // Rounding errors must not become a pair.
        if left_a <= 1e-12 * time {
            (i, left_a) = (i + 1, each_a);
        }
        if left_b <= 1e-12 * time {
            (j, left_b) = (j + 1, each_b);
        }
    }
    dealt
}

/// The largest q that all goals allow, with the fractions that reach it.
pub(crate) fn max_min(
    market: &Market,
    goals: &[Goal],
    pairs: Option<PairSpeed<'_>>,
) -> Result<Allocation, Unsolved> {
    let alone = pairs.is_none().then(|| central::max_min(market, goals, ModelSet::Useful));
    alone.flatten().map_or_else(|| corner(market, goals, pairs), Ok)
}

/// The same, solved as a linear program: a corner of all optimal solutions.
pub(crate) fn corner(
    market: &Market,
    goals: &[Goal],
    pairs: Option<PairSpeed<'_>>,
) -> Result<Allocation, Unsolved> {
    let mut program = Program::new(market, goals, pairs, &|_, _| 0.0);
    // Needs differ by orders of magnitude; they are scaled so that the largest is 1.
    let needs = program.classes.iter().map(|c| c.goal.need / c.fastest);
    let largest = needs.fold(0.0, f64::max);
    if largest <= 0.0 {
        return Ok(market.isolated());
    }
    let q = program.lp.var(1.0, 0.0, f64::INFINITY);
    for c in 0..program.classes.len() {
        let class = &program.classes[c];
        let need = class.goal.need / class.fastest / largest * class.count();
        let floor = class.goal.floor / class.fastest * class.count();
        let terms: Vec<(Var, f64)> = program.speed_of(c).chain([(q, -need)]).collect();
        program.lp.row(terms, Cmp::Ge, floor);
    }
    let (mut allocation, solution) = program.solve(market)?;
    allocation.value = solution.value(q) / largest;
    Ok(allocation)
}

/// Relative gain below which a job counts as not lifted.
const LIFT: f64 = 1e-4;

/// Jobs among the `rising` that cannot get more than they have `reached` while no job falls below
/// what it has reached. Gains of single jobs can be averaged to a gain of all of them, so one
/// program finds all bottlenecks.
pub(crate) fn bottlenecks(
    market: &Market,
    reached: &[f64],
    rising: &[bool],
    pairs: Option<PairSpeed<'_>>,
) -> Result<Vec<usize>, Unsolved> {
    let goal = |(floor, rises): (&f64, &bool)| Goal { need: f64::from(*rises), floor: *floor };
    let goals: Vec<Goal> = reached.iter().zip(rising).map(goal).collect();
    let mut program = Program::new(market, &goals, pairs, &|_, _| 0.0);
    let mut lifts = Vec::new();
    for c in 0..program.classes.len() {
        let class = &program.classes[c];
        let has = class.goal.floor / class.fastest * class.count();
        let mut terms: Vec<(Var, f64)> = program.speed_of(c).collect();
        if class.goal.need > 0.0 {
            let lift = program.lp.var(1.0, 0.0, 1.0);
            terms.push((lift, -has.max(1e-9) * LIFT));
            lifts.push((c, lift));
        }
        // Floors that were just reached may be infeasible by rounding.
        program.lp.row(terms, Cmp::Ge, has * (1.0 - 1e-7));
    }
    let (_, solution) = program.solve(market)?;
    let stuck = lifts.iter().filter(|(_, lift)| solution.value(*lift) < 0.5);
    Ok(stuck.flat_map(|(c, _)| program.classes[*c].members.iter().copied()).collect())
}

/// Speed that a job needs per unit of max-min fairness: a job on s GPUs gets 1/s of the time.
pub(crate) fn fair_need(market: &Market, claim: &Claim) -> f64 {
    claim.weight * market.proportional_speed(claim) / claim.gpus
}

pub(crate) fn fair_goals(market: &Market) -> Vec<Goal> {
    market.claims.iter().map(|c| Goal::of(fair_need(market, c))).collect()
}

/// Max-min fairness: maximises the lowest weighted, normalised effective speed.
pub(crate) fn fair(market: &Market, pairs: Option<PairSpeed<'_>>) -> Result<Allocation, Unsolved> {
    max_min(market, &fair_goals(market), pairs)
}

/// Relative precision of the search for the least finish-time ratio.
const RATIO_PRECISION: f64 = 1e-5;
/// Most steps of that search.
const RATIO_STEPS: usize = 60;

/// Finish-time fairness: minimises the largest ratio of the time with this allocation to the time
/// with an equal fraction; the value is that ratio.
pub(crate) fn finish_time(
    market: &Market,
    gpu_models: ModelSet,
    pairs: Option<PairSpeed<'_>>,
) -> Result<Allocation, Unsolved> {
    let alone_s = |c: &Claim| c.isolated_s + c.left.max(1e-9) / market.isolated_speed(c).max(1e-12);
    let can_run =
        |c: &Claim| c.speed.iter().zip(&market.gpus).any(|(t, n)| *t > 0.0 && *n >= c.gpus);
    if !market.claims.iter().any(can_run) {
        return Ok(market.isolated());
    }
    let goal = |c: &Claim| {
        let alone_s = alone_s(c);
        Goal { need: c.left.max(1e-9) / alone_s, floor: c.age_s / alone_s }
    };
    let goals: Vec<Goal> = market.claims.iter().map(goal).collect();
    let reached = |allocation: &Allocation| {
        let speeds = speeds(market, allocation, pairs);
        let ratio = |((c, goal), speed): ((&Claim, &Goal), &f64)| {
            if can_run(c) { goal.floor + goal.need / speed } else { 0.0 }
        };
        let all = market.claims.iter().zip(&goals).zip(&speeds);
        all.map(ratio).fold(0.0, f64::max)
    };
    let plain = || central::finish_time(market, &goals, gpu_models);
    if let Some(mut found) = pairs.is_none().then(plain).flatten() {
        found.value = reached(&found);
        return Ok(found);
    }
    // With pairs, or if the conic program fails for lack of precision: a search over the ratio, in
    // which each step is a linear program. It starts at the ratio that each job would have on its
    // fastest GPU model all of the time.
    let bound = |(c, goal): (&Claim, &Goal)| {
        let fastest = c.speed.iter().copied().fold(0.0, f64::max);
        if can_run(c) { goal.floor + goal.need / fastest } else { 0.0 }
    };
    let mut low = market.claims.iter().zip(&goals).map(bound).fold(0.0, f64::max);
    let at = |ratio: f64| {
        let goal = |g: &Goal| Goal::of(g.need / (ratio - g.floor).max(1e-9));
        max_min(market, &goals.iter().map(goal).collect::<Vec<_>>(), pairs)
    };
    let mut best = at(low * (1.0 + 1e-9))?;
    let mut high = reached(&best);
    for _ in 0..RATIO_STEPS {
        if high <= low * (1.0 + RATIO_PRECISION) {
            break;
        }
        let middle = f64::midpoint(low, high.min(low * 1e3));
        let found = at(middle)?;
        let ratio = reached(&found);
        if ratio < high {
            (best, high) = (found, ratio);
        }
        if ratio > middle * (1.0 + RATIO_PRECISION) {
            low = middle;
        }
    }
    best.value = high;
    Ok(best)
}

/// Effective speeds of all jobs, from their time alone and in pairs.
pub(crate) fn speeds(
    market: &Market,
    allocation: &Allocation,
    pairs: Option<PairSpeed<'_>>,
) -> Vec<f64> {
    let alone = market.claims.iter().zip(&allocation.alone);
    let mut speeds: Vec<f64> = alone.map(|(c, part)| effective(c, part)).collect();
    for (pair, speed) in allocation.pairs.iter().zip(pairs.into_iter().cycle()) {
        for (gpu_model, share) in pair.share.iter().enumerate().filter(|(_, s)| **s > 0.0) {
            let beside = speed(pair.members[0], pair.members[1], gpu_model);
            for (m, beside) in pair.members.into_iter().zip(beside) {
                speeds[m] += share * beside;
            }
        }
    }
    speeds
}

/// Maximises the sum of effective speeds, each divided by the price of the GPU model. With
/// `deadlines`, jobs with a deadline get the speed that they need to meet it. If not all deadlines
/// can be met, `all_or_none` gives up all of them, otherwise only those that cannot be met.
pub(crate) fn throughput(
    market: &Market,
    prices: &ByGpuModel,
    (deadlines, all_or_none): (bool, bool),
    pairs: Option<PairSpeed<'_>>,
) -> Result<Allocation, Unsolved> {
    let needed = |c: &Claim| match c.deadline_s {
        Some(left_s) if deadlines && left_s > 0.0 => c.left / left_s,
        Some(_) if deadlines => f64::INFINITY,
        _ => 0.0,
    };
    let mut floors: Vec<f64> = market.claims.iter().map(needed).collect();
    let mut late: Vec<usize> = Vec::new();
    if floors.iter().any(|f| *f > 0.0) {
        late = missed_deadlines(market, &floors, pairs)?;
        let drop_all = all_or_none && !late.is_empty();
        for (m, floor) in floors.iter_mut().enumerate() {
            if drop_all || late.contains(&m) {
                *floor = 0.0;
            }
        }
    }
    let goals: Vec<Goal> = floors.iter().map(|f| Goal { need: 0.0, floor: *f }).collect();
    let plain = pairs.is_none() && floors.iter().all(|f| *f == 0.0);
    let gpu_models = if all_or_none { ModelSet::All } else { ModelSet::Useful };
    if let Some(mut found) = plain.then(|| central::sum(market, prices, gpu_models)).flatten() {
        found.late = late;
        return Ok(found);
    }
    // Scaled so that the largest gain is about 1, which does not change the optimum.
    let gain = |c: &Class, k: usize| c.pace[k] * c.fastest / prices[k] * c.count();
    let of_market =
        market.claims.iter().flat_map(|c| c.speed.iter().zip(prices).map(|(t, p)| t / p));
    let largest = of_market.fold(1e-12, f64::max);
    let mut program = Program::new(market, &goals, pairs, &|c, k| gain(c, k) / largest);
    for c in 0..program.classes.len() {
        let class = &program.classes[c];
        if class.goal.floor > 0.0 {
            // Slightly less, so that rounding does not make the floor infeasible.
            let floor = class.goal.floor / class.fastest * class.count() * (1.0 - 1e-9);
            let terms: Vec<(Var, f64)> = program.speed_of(c).collect();
            program.lp.row(terms, Cmp::Ge, floor);
        }
    }
    let (mut allocation, _) = program.solve(market)?;
    allocation.value *= largest;
    allocation.late = late;
    Ok(allocation)
}

/// Jobs whose deadlines have to be given up so that all other jobs can have these speeds; the sum
/// of the relative shortfalls is minimised.
fn missed_deadlines(
    market: &Market,
    floors: &[f64],
    pairs: Option<PairSpeed<'_>>,
) -> Result<Vec<usize>, Unsolved> {
    let fastest = |c: &Claim| {
        let fitting = c.speed.iter().zip(&market.gpus).filter(|(_, n)| **n >= c.gpus);
        fitting.map(|(t, _)| *t).fold(0.0, f64::max)
    };
    // Jobs that are too slow even on their fastest GPU model are left out of the program.
    let reachable = |(c, f): (&Claim, &f64)| if *f <= fastest(c) { *f } else { 0.0 };
    let asked: Vec<f64> = market.claims.iter().zip(floors).map(reachable).collect();
    let goals: Vec<Goal> = asked.iter().map(|f| Goal { need: 0.0, floor: *f }).collect();
    let mut program = Program::new(market, &goals, pairs, &|_, _| 0.0);
    let mut misses = Vec::new();
    for c in 0..program.classes.len() {
        let class = &program.classes[c];
        if class.goal.floor > 0.0 {
            let floor = class.goal.floor / class.fastest * class.count();
            let miss = program.lp.var(-1.0, 0.0, f64::INFINITY);
            let terms: Vec<(Var, f64)> = program.speed_of(c).chain([(miss, 1.0)]).collect();
            program.lp.row(terms, Cmp::Ge, floor);
            misses.push((c, miss));
        }
    }
    let (_, solution) = program.solve(market)?;
    let missed = misses.iter().filter(|(_, v)| solution.value(*v) > 1e-6);
    let mut late: Vec<usize> =
        missed.flat_map(|(c, _)| program.classes[*c].members.iter().copied()).collect();
    late.extend((0..asked.len()).filter(|m| asked[*m] < floors[*m]));
    late.sort_unstable();
    Ok(late)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::gavel::allocation::makespan::makespan;
    use crate::policy::gavel::allocation::testing::{close, market};
    use proptest::prelude::*;

    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-4 * expected.abs(), "{found}, expected {expected}");
    }

    /// Example A: the second job gains less from the faster GPU model.
    fn two() -> Market {
        market(&[1.0, 1.0], &[&[1.0, 4.0], &[1.0, 2.0]])
    }

    fn three() -> Market {
        let speeds: &[&[f64]] = &[&[1.0, 2.0, 4.0], &[1.0, 1.5, 2.0], &[1.0, 3.0, 10.0]];
        market(&[1.0, 1.0, 1.0], speeds)
    }

    #[test]
    fn fairness_of_two_jobs() {
        let equal = fair(&two(), None).unwrap();
        near(equal.value, 1.0);
        close(&equal.alone, &[&[0.5, 0.5], &[0.5, 0.5]]);
        let mut heavy = two();
        heavy.claims[0].weight = 2.0;
        let found = fair(&heavy, None).unwrap();
        near(found.value, 14.0 / 19.0);
        let (small, large) = (2.0 / 19.0, 17.0 / 19.0);
        close(&found.alone, &[&[small, large], &[large, small]]);
    }

    #[test]
    fn fairness_of_three_jobs_and_of_a_gang() {
        near(fair(&three(), None).unwrap().value, 93.0 / 89.0);
        let mut gang = market(&[2.0, 2.0], &[&[1.0, 4.0], &[1.0, 2.0], &[2.0, 6.0]]);
        gang.claims[2].gpus = 2.0;
        let found = fair(&gang, None).unwrap();
        near(found.value, 1.3);
        close(&found.alone, &[&[0.25, 0.75], &[0.05, 0.95], &[0.85, 0.15]]);
    }

    #[test]
    fn finish_time_fairness_has_the_expected_values() {
        let mut m = two();
        (m.claims[0].left, m.claims[1].left) = (4000.0, 2000.0);
        near(finish_time(&m, ModelSet::Useful, None).unwrap().value, 1.0);
        m.claims[0].age_s = 1000.0;
        let found = finish_time(&m, ModelSet::Useful, None).unwrap();
        near(found.value, 1.320_802);
        close(&found.alone, &[&[0.135_674, 0.864_326], &[0.864_326, 0.135_674]]);
    }

    #[test]
    fn throughput_is_largest_and_meets_deadlines() {
        let free = ByGpuModel::from_slice(&[1.0, 1.0, 1.0]);
        let found = throughput(&two(), &free, (false, false), None).unwrap();
        near(found.value, 5.0);
        close(&found.alone, &[&[0.0, 1.0], &[1.0, 0.0]]);
        let found = throughput(&three(), &free, (false, false), None).unwrap();
        near(found.value, 13.0);
        let mut m = two();
        (m.claims[1].left, m.claims[1].deadline_s) = (2000.0, Some(1250.0));
        let found = throughput(&m, &free, (true, false), None).unwrap();
        close(&found.alone, &[&[0.6, 0.4], &[0.4, 0.6]]);
        assert!(found.late.is_empty());
        // A deadline that cannot be met is given up, the other one is met.
        (m.claims[0].left, m.claims[0].deadline_s) = (9000.0, Some(10.0));
        let found = throughput(&m, &free, (true, false), None).unwrap();
        assert_eq!(found.late, [0]);
        close(&found.alone, &[&[0.6, 0.4], &[0.4, 0.6]]);
        let found = throughput(&m, &free, (true, true), None).unwrap();
        close(&found.alone, &[&[0.0, 1.0], &[1.0, 0.0]]);
    }

    #[test]
    fn cost_counts_speed_per_price() {
        let prices = ByGpuModel::from_slice(&[0.1, 1.0]);
        let found = throughput(&two(), &prices, (false, false), None).unwrap();
        // Per dollar: 10 and 4 for the first, 10 and 2 for the second.
        close(&found.alone, &[&[0.0, 1.0], &[1.0, 0.0]]);
        near(found.value, 14.0);
    }

    #[test]
    fn pairs_share_where_that_is_faster() {
        // Example G.
        let speed = |_: usize, _: usize, k: usize| [[3.0, 1.5], [0.4, 0.4]][k];
        let one = market(&[1.0], &[&[4.0], &[2.0]]);
        let found = fair(&one, Some(&speed)).unwrap();
        near(found.value, 0.75);
        close(&found.alone, &[&[0.0], &[0.0]]);
        assert_eq!((found.pairs.len(), found.pairs[0].members), (1, [0, 1]));
        let both = market(&[1.0, 1.0], &[&[4.0, 1.0], &[2.0, 1.0]]);
        let found = fair(&both, Some(&speed)).unwrap();
        near(found.pairs[0].share[0], 14.0 / 17.0);
        close(&found.alone, &[&[0.0, 3.0 / 17.0], &[3.0 / 17.0, 0.0]]);
    }

    #[test]
    fn every_objective_can_use_pairs() {
        // Example G with one GPU model: both run all of the time, at three quarters of their speed.
        let speed = |_: usize, _: usize, _: usize| [3.0, 1.5];
        let mut one = market(&[1.0], &[&[4.0], &[2.0]]);
        (one.claims[0].left, one.claims[1].left) = (4000.0, 2000.0);
        near(finish_time(&one, ModelSet::Useful, None).unwrap().value, 1.0);
        let found = finish_time(&one, ModelSet::Useful, Some(&speed)).unwrap();
        near(found.value, 2.0 / 3.0);
        near(found.pairs[0].share[0], 1.0);
        let free = ByGpuModel::from_slice(&[1.0]);
        near(throughput(&one, &free, (false, false), None).unwrap().value, 4.0);
        let found = throughput(&one, &free, (false, false), Some(&speed)).unwrap();
        near(found.value, 4.5);
        near(found.pairs[0].share[0], 1.0);
        let half = ByGpuModel::from_slice(&[0.5]);
        near(throughput(&one, &half, (false, false), Some(&speed)).unwrap().value, 9.0);
        // Deadlines that can be met only in a pair: both jobs need more than half of their time.
        (one.claims[0].deadline_s, one.claims[1].deadline_s) = (Some(1600.0), Some(1600.0));
        assert_eq!(throughput(&one, &free, (true, false), None).unwrap().late.len(), 1);
        assert!(throughput(&one, &free, (true, false), Some(&speed)).unwrap().late.is_empty());
    }

    #[test]
    fn jobs_of_a_class_get_equal_time_in_pairs() {
        let speed = |_: usize, _: usize, _: usize| [0.9, 0.9];
        for jobs in 2..6 {
            let crowd = market(&[1.0], &vec![&[1.0][..]; jobs]);
            let found = fair(&crowd, Some(&speed)).unwrap();
            near(found.value, 1.8 / jobs as f64);
            for m in 0..jobs {
                let mine = found.pairs.iter().filter(|p| p.members.contains(&m));
                near(mine.map(|p| p.share[0]).sum(), 2.0 / jobs as f64);
            }
        }
        // Two classes, one of them with twice as many jobs.
        let crowd = market(&[1.0], &[&[1.0], &[1.0], &[2.0]]);
        let unlike = |a: usize, b: usize, _: usize| {
            if (a < 2) == (b < 2) {
                [0.1, 0.1]
            } else if a < 2 {
                [1.0, 2.0]
            } else {
                [2.0, 1.0]
            }
        };
        let found = fair(&crowd, Some(&unlike)).unwrap();
        let with_last = found.pairs.iter().filter(|p| p.members[1] == 2);
        assert_eq!(with_last.count(), 2);
    }

    proptest! {
        #[test]
        fn fractions_fit_for_any_market(
            gpus in prop::collection::vec(1u8..5, 3),
            jobs in prop::collection::vec(
                (prop::collection::vec(0u8..9, 3), 1u8..4, 1u8..5, 1u16..900),
                1..9,
            ),
            scale in 1u8..9,
        ) {
            let gpus: ByGpuModel = gpus.into_iter().map(f64::from).collect();
            let mut m = Market { gpus, ..Market::default() };
            for (speed, width, weight, left) in jobs {
                let speed = speed.into_iter().map(|s| f64::from(s) / 2.0).collect::<Vec<_>>();
                let mut claim = crate::policy::gavel::allocation::testing::claim(&speed);
                (claim.gpus, claim.weight) = (f64::from(width), f64::from(weight));
                claim.left = f64::from(left);
                claim.deadline_s = (left % 3 == 0).then_some(200.0);
                m.claims.push(claim);
            }
            let free = ByGpuModel::from_elem(1.0, 3);
            let mut scaled = m.clone();
            for claim in &mut scaled.claims {
                claim.speed.iter_mut().for_each(|t| *t *= f64::from(scale));
                claim.left *= f64::from(scale);
            }
            let solve = |m: &Market| {
                let finish_time = finish_time(m, ModelSet::Useful, None);
                let throughput = throughput(m, &free, (true, false), None);
                [fair(m, None), makespan(m, None), finish_time, throughput].map(Result::unwrap)
            };
            let found = solve(&m);
            for (i, allocation) in found.iter().enumerate() {
                let mut used = [0.0; 3];
                for (claim, row) in m.claims.iter().zip(&allocation.alone) {
                    prop_assert!(row.iter().sum::<f64>() <= 1.0 + 1e-6, "{i} {row:?}");
                    for k in 0..3 {
                        prop_assert!(row[k] >= 0.0);
                        used[k] += row[k] * claim.gpus;
                    }
                }
                let fits = used.iter().zip(&m.gpus).all(|(u, n)| *u <= n * (1.0 + 1e-5));
                prop_assert!(fits, "{i} {used:?}");
            }
            for (a, b) in found.iter().zip(solve(&scaled)).take(3) {
                prop_assert!((a.value - b.value).abs() <= 1e-4 * a.value.abs().max(1e-9));
            }
        }
    }
}
