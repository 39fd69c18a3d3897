//! Programs solved by an interior-point method, which returns the centre of all optimal solutions.
//!
//! The rows of each program are those of the released code, in its units, because the centre
//! depends on them.

use crate::math::conic::{Answer, EXACT, Link, Program, Shape};
use crate::policy::gavel::allocation::program::{Class, Goal, PairSpeed, classes};
use crate::policy::gavel::allocation::{Allocation, ByGpuModel, Market, Pair};
use smallvec::SmallVec;

/// GPU models on which a job may have a fraction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ModelSet {
    /// Models on which the job makes progress.
    Useful,
    /// All models, even where the job makes no progress, as in the released code. This moves the
    /// centre.
    All,
}

/// A program over the fractions of classes, with a block for each class.
struct Parts<'a> {
    market: &'a Market,
    gpu_models: ModelSet,
    classes: Vec<Class>,
    program: Program,
}

impl<'a> Parts<'a> {
    fn new(
        market: &'a Market,
        goals: &[Goal],
        gpu_models: ModelSet,
        shape: Shape,
        common_cost: f64,
    ) -> Self {
        let link = |n: &f64| Link { count: 1.0, common: 0.0, bound: *n };
        let links = market.gpus.iter().map(link).collect();
        let mut program = Program::new(shape, links, common_cost);
        let classes = classes(market, goals);
        program.reserve(classes.len(), market.gpus.len() + usize::from(shape.cone));
        Self { market, gpu_models, classes, program }
    }

    /// Adds a block for each class; `rest` adds its rows, given the speeds of its variables. Bounds
    /// the time of each job by 1 and the use of each GPU model by its GPUs.
    fn fill(
        mut self,
        costs: &dyn Fn(&Class, &[usize]) -> ByGpuModel,
        rest: &dyn Fn(&Class, &[f64], &mut Program),
    ) -> Self {
        for class in &self.classes {
            let used = used(self.gpu_models, class);
            let costs = costs(class, &used);
            let speeds: ByGpuModel = used.iter().map(|k| class.pace[*k] * class.fastest).collect();
            self.program.block(class.count(), &costs);
            let mut time = ByGpuModel::from_elem(1.0, used.len());
            time.resize(costs.len(), 0.0);
            self.program.row(&time, 0.0, 1.0);
            rest(class, &speeds, &mut self.program);
            for (j, k) in used.iter().enumerate() {
                self.program.link(j, *k, class.gpus, class.count());
            }
        }
        self
    }

    fn solve(self, precision: f64) -> Option<(Allocation, Vec<Class>, Answer)> {
        let (gpu_models, cone) = (self.gpu_models, self.program.has_cones());
        let answer = self.program.solve(precision)?;
        let jobs = self.market.claims.len();
        let mut alone = vec![ByGpuModel::from_elem(0.0, self.market.gpus.len()); jobs];
        let mut values = answer.values.iter();
        for class in &self.classes {
            let mut part = ByGpuModel::from_elem(0.0, self.market.gpus.len());
            for k in used(gpu_models, class) {
                part[k] = values.next().map_or(0.0, |x| x.clamp(0.0, 1.0));
            }
            if cone {
                values.next();
            }
            within_all(&mut part);
            class.members.iter().for_each(|m| alone[*m].clone_from(&part));
        }
        Some((Allocation { alone, ..Allocation::default() }, self.classes, answer))
    }
}

fn used(gpu_models: ModelSet, class: &Class) -> SmallVec<[usize; 4]> {
    let all = gpu_models == ModelSet::All;
    (0..class.pace.len()).filter(|k| all || class.pace[*k] > 0.0).collect()
}

/// The solution has rounding errors; no job may have more than all its time.
fn within_all(part: &mut ByGpuModel) {
    let all = part.iter().sum::<f64>().max(1.0);
    part.iter_mut().for_each(|x| *x /= all);
}

fn free(_: &Class, used: &[usize]) -> ByGpuModel {
    ByGpuModel::from_elem(0.0, used.len())
}

/// Requires a speed of at least `floor + need · q`, in units of the need.
fn reach_goal(class: &Class, speeds: &[f64], program: &mut Program) {
    let Goal { need, floor } = class.goal;
    // The common variable is −q, which is minimised.
    let (unit, common) = if need > 0.0 { (need, -1.0) } else { (1.0, 0.0) };
    let factors: ByGpuModel = speeds.iter().map(|t| -t / unit).collect();
    program.row(&factors, common, -floor / unit);
}

/// The largest q that all goals allow.
pub(crate) fn max_min(market: &Market, goals: &[Goal], gpu_models: ModelSet) -> Option<Allocation> {
    max_min_to(EXACT, market, goals, gpu_models)
}

/// [`max_min`] to a precision.
pub(crate) fn max_min_to(
    precision: f64,
    market: &Market,
    goals: &[Goal],
    gpu_models: ModelSet,
) -> Option<Allocation> {
    let shape = Shape { rows: 2, cone: false };
    let parts = Parts::new(market, goals, gpu_models, shape, 1.0).fill(&free, &reach_goal);
    if parts.classes.iter().all(|c| c.goal.need <= 0.0) {
        return None;
    }
    let (mut allocation, classes, answer) = parts.solve(precision)?;
    allocation.value = -*answer.values.last()?;
    allocation.prices = answer.links.iter().copied().collect();
    if allocation.value < 0.0 {
        // The floors cannot be reached.
        return None;
    }
    allocation.binds = vec![false; market.claims.len()];
    for (class, rows) in classes.iter().zip(answer.rows.chunks_exact(shape.rows)) {
        // For a goal that binds, the slack goes to 0 and the price does not.
        let (slack, price) = rows[1];
        class.members.iter().for_each(|m| allocation.binds[*m] = price > slack);
    }
    Some(allocation)
}

/// Any fractions that reach all floors, if the solver is certain.
pub(crate) fn enough(market: &Market, goals: &[Goal]) -> Option<Allocation> {
    let shape = Shape { rows: 2, cone: false };
    let parts = Parts::new(market, goals, ModelSet::All, shape, 0.0).fill(&free, &reach_goal);
    let (allocation, _, answer) = parts.solve(EXACT)?;
    answer.exact.then_some(allocation)
}

/// The largest sum of speeds, each divided by the price of the GPU model.
pub(super) fn sum(
    market: &Market,
    prices: &ByGpuModel,
    gpu_models: ModelSet,
) -> Option<Allocation> {
    let goals = vec![Goal::of(0.0); market.claims.len()];
    let gain = |c: &Class, k: usize| c.pace[k] * c.fastest / prices[k];
    let costs = |c: &Class, used: &[usize]| used.iter().map(|k| -gain(c, *k)).collect();
    let shape = Shape { rows: 1, cone: false };
    let parts = Parts::new(market, &goals, gpu_models, shape, 0.0).fill(&costs, &|_, _, _| {});
    let (mut allocation, classes, _) = parts.solve(EXACT)?;
    let of = |c: &Class| {
        let part = &allocation.alone[c.members[0]];
        let gains = part.iter().enumerate().map(|(k, x)| gain(c, k) * x);
        gains.sum::<f64>() * c.count()
    };
    allocation.value = classes.iter().map(of).sum();
    Some(allocation)
}

/// Minimises the largest `floor + need ÷ speed`.
pub(super) fn finish_time(
    market: &Market,
    goals: &[Goal],
    gpu_models: ModelSet,
) -> Option<Allocation> {
    // A single job needs no common bound: its ratio is the objective.
    let alone = market.claims.len() == 1;
    let shape = Shape { rows: if alone { 1 } else { 2 }, cone: true };
    let costs = |c: &Class, used: &[usize]| {
        let mut costs = ByGpuModel::from_elem(0.0, used.len());
        costs.push(if alone { c.goal.need } else { 0.0 });
        costs
    };
    let rest = |c: &Class, speeds: &[f64], program: &mut Program| {
        if !alone {
            let mut ratio = ByGpuModel::from_elem(0.0, speeds.len());
            ratio.push(c.goal.need);
            program.row(&ratio, -1.0, -c.goal.floor);
        }
        program.inverse(speeds);
    };
    let common_cost = if alone { 0.0 } else { 1.0 };
    let parts = Parts::new(market, goals, gpu_models, shape, common_cost).fill(&costs, &rest);
    Some(parts.solve(EXACT)?.0)
}

/// The largest q that all needs allow if jobs of equal width may share GPUs, with all GPU models
/// and all pairs.
pub(crate) fn max_min_of_pairs(
    market: &Market,
    goals: &[Goal],
    speed: PairSpeed<'_>,
) -> Option<Allocation> {
    let classes = classes(market, goals);
    let gpu_models = market.gpus.len();
    let (time, goal) = (gpu_models, gpu_models + classes.len());
    let mut links: Vec<Link> = Vec::with_capacity(gpu_models + 2 * classes.len());
    links.extend(market.gpus.iter().map(|n| Link { count: 1.0, common: 0.0, bound: *n }));
    let of_class = |common: f64, bound: f64| {
        classes.iter().map(move |c| Link { count: c.count(), common, bound })
    };
    links.extend(of_class(0.0, 1.0));
    links.extend(of_class(-1.0, 0.0));
    let mut program = Program::new(Shape { rows: 0, cone: false }, links, 1.0);
    for (c, class) in classes.iter().enumerate() {
        for k in 0..gpu_models {
            let count = class.count();
            program.block(count, &[0.0]);
            program.link(0, k, class.gpus, count);
            program.link(0, time + c, 1.0, count);
            program.link(0, goal + c, -class.pace[k] * class.fastest / class.goal.need, count);
        }
    }
    let alone = classes.len() * gpu_models;
    let mut together = Vec::new();
    for (c, a) in classes.iter().enumerate() {
        for (d, b) in classes.iter().enumerate().skip(c) {
            let same = c == d;
            if a.gpus != b.gpus || (same && a.members.len() < 2) {
                continue;
            }
            let members = [a.members[0], b.members[usize::from(same)]];
            let count =
                if same { a.count() * (a.count() - 1.0) / 2.0 } else { a.count() * b.count() };
            for k in 0..gpu_models {
                let [x, y] = speed(members[0], members[1], k);
                program.block(count, &[0.0]);
                program.link(0, k, a.gpus, count);
                let mut meets = |class: usize, speed: f64, pairs: f64| {
                    program.link(0, time + class, 1.0, pairs);
                    program.link(0, goal + class, -speed / classes[class].goal.need, pairs);
                };
                if same {
                    meets(c, x, 2.0 * count);
                } else {
                    meets(c, x, count);
                    meets(d, y, count);
                }
                together.push((c, d, k, x > 0.0 && y > 0.0));
            }
        }
    }
    let answer = program.solve(EXACT)?;
    let none = ByGpuModel::from_elem(0.0, gpu_models);
    let mut allocation =
        Allocation { alone: vec![none.clone(); market.claims.len()], ..Allocation::default() };
    let part = |x: &f64| x.clamp(0.0, 1.0);
    for (class, row) in classes.iter().zip(answer.values[..alone].chunks_exact(gpu_models)) {
        for m in &class.members {
            allocation.alone[*m] = row.iter().map(part).collect();
        }
    }
    let shares = answer.values[alone..].chunks_exact(gpu_models);
    for (of, share) in together.chunks_exact(gpu_models).zip(shares) {
        // Pairs without progress get no time.
        let share = of.iter().zip(share).map(|((.., gains), x)| if *gains { part(x) } else { 0.0 });
        let share: ByGpuModel = share.collect();
        let (c, d, ..) = of[0];
        for (i, first) in classes[c].members.iter().enumerate() {
            let others = &classes[d].members[if c == d { i + 1 } else { 0 }..];
            for second in others {
                let members = [*first.min(second), *first.max(second)];
                allocation.pairs.push(Pair { members, share: share.clone() });
            }
        }
    }
    allocation.pairs.retain(|p| p.share.iter().any(|x| *x > 0.0));
    allocation.pairs.sort_by_key(|p| p.members);
    allocation.value = -*answer.values.last()?;
    Some(allocation)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::gavel::allocation::program::fair;
    use crate::policy::gavel::allocation::testing::{claim, market};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn with_pairs_centre_and_corner_have_the_same_value(
            gpus in prop::collection::vec(1u8..4, 2),
            jobs in prop::collection::vec((prop::collection::vec(1u8..5, 2), 1u8..3), 1..7),
            slower in prop::collection::vec(0u8..10, 8),
        ) {
            let gpus: Vec<f64> = gpus.into_iter().map(f64::from).collect();
            let mut m = market(&gpus, &[] as &[&[f64]]);
            for (speed, weight) in jobs {
                let speed: Vec<f64> = speed.into_iter().map(f64::from).collect();
                let mut claim = claim(&speed);
                claim.weight = f64::from(weight);
                m.claims.push(claim);
            }
            // Jobs of one class are also equal beside other jobs.
            let class = |j: usize| m.claims[j].speed[0] as usize;
            let pace = |a: usize, b: usize| f64::from(slower[(class(a) + class(b)) % 8]) / 10.0;
            let speed = |a: usize, b: usize, k: usize| {
                [a, b].map(|j| m.claims[j].speed[k] * pace(a, b))
            };
            let goals: Vec<Goal> = m
                .claims
                .iter()
                .map(|c| Goal::of(crate::policy::gavel::allocation::program::fair_need(&m, c)))
                .collect();
            let centre = max_min_of_pairs(&m, &goals, &speed).expect("there is a solution");
            let corner = fair(&m, Some(&speed)).unwrap();
            prop_assert!((centre.value - corner.value).abs() < 1e-5 * corner.value);
            let mut time: Vec<f64> = centre.alone.iter().map(|p| p.iter().sum()).collect();
            for pair in &centre.pairs {
                pair.members.iter().for_each(|m| time[*m] += pair.share.iter().sum::<f64>());
            }
            prop_assert!(time.iter().all(|t| *t < 1.0 + 1e-6), "{time:?}");
            for k in 0..2 {
                let alone: f64 = centre.alone.iter().map(|p| p[k]).sum();
                let together: f64 = centre.pairs.iter().map(|p| p.share[k]).sum();
                prop_assert!(alone + together < m.gpus[k] + 1e-6);
            }
        }
    }
}
