//! Sharing a few goods among many parties: a linear program whose shape makes it cheap.
//!
//! Party m takes amounts `x[m][j]` of the goods j, together at most 1. Of good j there is a supply, and
//! a party uses it up by its size. What the amounts are worth to a party must reach
//! `floor + need · q`; the largest q is wanted, or, without a q, the largest sum of gains.
//!
//! An interior-point method (Mehrotra's predictor and corrector). Each party meets the others only in the
//! supplies and in q, so a step costs one small system per party and one of the size of the goods:
//! linear in the parties. Where many answers are best it ends in the middle of them, and it tells which
//! parties hold q down. A solver for programs of any shape is [`super::lp`].

use smallvec::SmallVec;

/// Numbers by good.
pub type ByGood = SmallVec<[f64; 4]>;

/// Who takes part.
#[derive(Clone, Debug, PartialEq)]
pub struct Party {
    /// What a unit of each good is worth to it; 0 = it cannot use it.
    pub worth: ByGood,
    /// What it uses up of a supply for each unit.
    pub size: f64,
    /// Worth that it has to get for each unit of q.
    pub need: f64,
    /// Worth that it has to get in any case.
    pub floor: f64,
}

impl Party {
    /// Whether it asks for anything; if not, it has no row of its own for it.
    fn has_goal(&self) -> bool {
        self.need > 0.0 || self.floor > 0.0
    }
}

/// What is to be shared.
#[derive(Clone, Debug, PartialEq)]
pub struct Sharing {
    /// How much there is of each good.
    pub supply: ByGood,
    /// Who wants it.
    pub parties: Vec<Party>,
    /// Where a sum of gains is wanted in place of q: the gain of each party for a unit of each good.
    pub gains: Option<Vec<ByGood>>,
}

/// How it is shared.
#[derive(Clone, Debug, PartialEq)]
pub struct Shared {
    /// Amounts by party and good.
    pub amounts: Vec<ByGood>,
    /// The largest q, or the largest sum.
    pub value: f64,
    /// Whether a party's goal is among those that hold q down.
    pub binds: Vec<bool>,
}

/// Steps after which the search is given up; it needs fewer than 30.
const STEPS: usize = 100;
const PRECISION: f64 = 1e-6;
/// What is taken if the numbers get no better.
const GOOD_ENOUGH: f64 = 1e-4;

/// A point: primal values, duals of their signs, duals of the rows.
///
/// Values lie party by party (its amounts, what it has beyond its goal, what is left of its unit), then
/// what is left of each supply, then q. Rows lie party by party (goal, unit), then the supplies.
#[derive(Clone)]
struct Point {
    v: Vec<f64>,
    w: Vec<f64>,
    y: Vec<f64>,
}

/// What one step of the search needs of a point.
struct Factor {
    ratio: Vec<f64>,
    system: Vec<f64>,
    /// The inverse of the two rows of each party, `[goal, cross, unit]`.
    inverse: Vec<[f64; 3]>,
    /// What each good of each party passes on of the gaps of these rows.
    passed: Vec<[f64; 2]>,
}

/// The two rows of a party, weighed by `d`: `[[goal, cross], [cross, unit]]`.
struct Rows<'a> {
    party: &'a Party,
    d: &'a [f64],
    goods: usize,
    goal: f64,
    cross: f64,
    unit: f64,
    det: f64,
}

impl<'a> Rows<'a> {
    fn new(party: &'a Party, d: &'a [f64], goods: usize) -> Option<Self> {
        let mut rows =
            Self { party, d, goods, goal: 1.0, cross: 0.0, unit: d[goods + 1], det: 1.0 };
        rows.unit += d[..goods].iter().sum::<f64>();
        if party.has_goal() {
            rows.goal = d[goods];
            for (d, worth) in d[..goods].iter().zip(&party.worth) {
                rows.goal += d * worth * worth;
                rows.cross += d * worth;
            }
        }
        rows.det = rows.without(goods);
        (rows.det > 0.0 && rows.det.is_finite()).then_some(rows)
    }

    /// Determinant as it would be without one good.
    fn without(&self, good: usize) -> f64 {
        let (worth, d) = (&self.party.worth, self.d);
        let others = || (0..self.goods).filter(|l| *l != good);
        if !self.party.has_goal() {
            return others().map(|l| d[l]).sum::<f64>() + d[self.goods + 1];
        }
        let (goal, unit) = (d[self.goods], d[self.goods + 1]);
        let mut det = goal * unit;
        for l in others() {
            det += d[l] * (goal + unit * worth[l] * worth[l]);
            for r in others().filter(|r| *r < l) {
                let apart = worth[l] - worth[r];
                det += d[l] * d[r] * apart * apart;
            }
        }
        det
    }

    /// How two goods stand in for each other.
    fn between(&self, i: usize, j: usize) -> f64 {
        if !self.party.has_goal() {
            return 1.0;
        }
        let (worth, d) = (&self.party.worth, self.d);
        let others = (0..self.goods).filter(|l| *l != i && *l != j);
        let rest: f64 = others.map(|l| d[l] * (worth[l] - worth[i]) * (worth[l] - worth[j])).sum();
        rest + worth[i] * worth[j] * d[self.goods + 1] + d[self.goods]
    }

    /// What a good adds to the goal beyond what it takes of the unit, and conversely.
    fn goal_of(&self, j: usize) -> f64 {
        if !self.party.has_goal() {
            return 0.0;
        }
        let (worth, d) = (&self.party.worth, self.d);
        let rest: f64 = (0..self.goods).map(|l| d[l] * (worth[j] - worth[l])).sum();
        rest + worth[j] * d[self.goods + 1]
    }

    fn unit_of(&self, j: usize) -> f64 {
        if !self.party.has_goal() {
            return 1.0;
        }
        let (worth, d) = (&self.party.worth, self.d);
        let rest: f64 = (0..self.goods).map(|l| d[l] * worth[l] * (worth[l] - worth[j])).sum();
        rest + d[self.goods]
    }
}

struct Solver<'a> {
    program: &'a Sharing,
    goods: usize,
    /// Objective, to be made small.
    cost: Vec<f64>,
    /// Whether a value exists: amounts of goods that a party cannot use do not.
    exists: Vec<bool>,
}

impl Sharing {
    /// The best shares; `None` if there are none, or if the search lost its way.
    pub fn solve(&self) -> Option<Shared> {
        let goods = self.supply.len();
        let sane = |p: &Party| {
            let numbers = p.worth.iter().chain([&p.size, &p.need, &p.floor]);
            p.worth.len() == goods && numbers.into_iter().all(|n| n.is_finite() && *n >= 0.0)
        };
        if !self.parties.iter().all(sane) || !self.supply.iter().all(|n| n.is_finite()) {
            return None;
        }
        Solver::new(self, goods).run()
    }
}

impl<'a> Solver<'a> {
    fn new(program: &'a Sharing, goods: usize) -> Self {
        let stride = goods + 2;
        let len = program.parties.len() * stride + goods + 1;
        let (mut cost, mut exists) = (vec![0.0; len], vec![true; len]);
        for (m, party) in program.parties.iter().enumerate() {
            for j in 0..goods {
                exists[m * stride + j] = party.worth[j] > 0.0 && program.supply[j] > 0.0;
                if let Some(gains) = &program.gains {
                    cost[m * stride + j] = -gains[m][j];
                }
            }
            exists[m * stride + goods] = party.has_goal();
        }
        for j in 0..goods {
            exists[len - 1 - goods + j] = program.supply[j] > 0.0;
        }
        // Without a q to maximise it costs something and stays at 0.
        cost[len - 1] = if program.gains.is_some() { 1.0 } else { -1.0 };
        Self { program, goods, cost, exists }
    }

    fn stride(&self) -> usize {
        self.goods + 2
    }

    /// Place of what is left of the first supply.
    fn left(&self) -> usize {
        self.program.parties.len() * self.stride()
    }

    fn q(&self) -> usize {
        self.left() + self.goods
    }

    /// Inside all signs, and as far from the edges as is easily done.
    fn start(&self) -> Point {
        let Sharing { supply, parties, .. } = self.program;
        let size: f64 = parties.iter().map(|p| p.size).sum();
        let mut v = vec![1.0; self.q() + 1];
        let mut q = f64::INFINITY;
        for (m, party) in parties.iter().enumerate() {
            let row = &mut v[m * self.stride()..][..self.goods];
            for (x, n) in row.iter_mut().zip(supply) {
                *x = (0.5 / self.goods as f64).min(0.5 * n / size);
            }
            let worth: f64 = row.iter().zip(&party.worth).map(|(x, a)| x * a).sum();
            if party.need > 0.0 {
                q = q.min(0.5 * (worth - party.floor).max(0.1 * worth) / party.need);
            }
        }
        let last = v.len() - 1;
        v[last] = if q.is_finite() && self.program.gains.is_none() { q.max(1e-6) } else { 1.0 };
        for (value, exists) in v.iter_mut().zip(&self.exists) {
            *value = if *exists { value.max(1e-9) } else { 0.0 };
        }
        let mut point = Point { v, w: vec![1.0; last + 1], y: Vec::new() };
        point.y = vec![0.0; 2 * parties.len() + self.goods];
        // Slacks take up what the rest leaves, if that is positive.
        let gaps = self.row_gaps(&point.v);
        for m in 0..parties.len() {
            let at = m * self.stride() + self.goods;
            if self.exists[at] {
                point.v[at] = (point.v[at] - gaps[2 * m]).max(0.01);
            }
            point.v[at + 1] = (point.v[at + 1] + gaps[2 * m + 1]).max(0.01);
        }
        for j in 0..self.goods {
            if self.exists[self.left() + j] {
                let at = self.left() + j;
                point.v[at] = (point.v[at] + gaps[2 * parties.len() + j]).max(0.01);
            }
        }
        point
    }

    /// By how much each row is missed: right side minus left.
    fn row_gaps(&self, v: &[f64]) -> Vec<f64> {
        let Sharing { supply, parties, .. } = self.program;
        let q = v[self.q()];
        let mut gaps = Vec::with_capacity(2 * parties.len() + self.goods);
        let mut used: ByGood = (0..self.goods).map(|j| v[self.left() + j]).collect();
        for (m, party) in parties.iter().enumerate() {
            let row = &v[m * self.stride()..][..self.stride()];
            let (mut worth, mut sum) = (0.0, 0.0);
            for j in 0..self.goods {
                worth += party.worth[j] * row[j];
                sum += row[j];
                used[j] += party.size * row[j];
            }
            let goal = party.floor - (worth - party.need * q - row[self.goods]);
            gaps.push(if party.has_goal() { goal } else { 0.0 });
            gaps.push(1.0 - (sum + row[self.goods + 1]));
        }
        gaps.extend(supply.iter().zip(&used).map(|(n, u)| n - u));
        gaps
    }

    /// What the rows ask of each value: the transposed matrix times `y`.
    fn asked(&self, y: &[f64]) -> Vec<f64> {
        let parties = &self.program.parties;
        let supply = &y[2 * parties.len()..];
        let mut asked = Vec::with_capacity(self.q() + 1);
        let mut of_q = 0.0;
        for (m, party) in parties.iter().enumerate() {
            let (goal, unit) = (y[2 * m], y[2 * m + 1]);
            let of_good = |j: usize| party.worth[j] * goal + unit + party.size * supply[j];
            asked.extend((0..self.goods).map(of_good));
            asked.extend([-goal, unit]);
            of_q -= party.need * goal;
        }
        asked.extend_from_slice(supply);
        asked.push(of_q);
        asked
    }

    fn run(&self) -> Option<Shared> {
        let mut p = self.start();
        let count = self.exists.iter().filter(|e| **e).count() as f64;
        let mut good = None;
        for _ in 0..STEPS {
            let gaps = self.row_gaps(&p.v);
            let asked = self.asked(&p.y);
            let slopes: Vec<f64> = (0..p.v.len())
                .map(|i| if self.exists[i] { self.cost[i] - asked[i] - p.w[i] } else { 0.0 })
                .collect();
            let product = dot(&p.v, &p.w);
            let mu = product / count;
            let scale = 1.0 + dot(&self.cost, &p.v).abs();
            let off = largest(&gaps).max(largest(&slopes)).max(product / scale);
            if off < PRECISION {
                return Some(self.answer(&p));
            } else if off < GOOD_ENOUGH {
                good = Some(self.answer(&p));
            } else if good.is_some() || !off.is_finite() {
                // The numbers will not get better.
                break;
            }
            let Some(factor) = self.factor(&p) else { break };
            let towards: Vec<f64> = p.v.iter().zip(&p.w).map(|(v, w)| -v * w).collect();
            let Some(ahead) = self.direction(&p, &factor, &gaps, &slopes, &towards) else { break };
            let (a, b) = (self.reach(&p.v, &ahead.v), self.reach(&p.w, &ahead.w));
            let then = (0..p.v.len()).filter(|i| self.exists[*i]);
            let then: f64 = then
                .map(|i| (p.v[i] + a.min(1.0) * ahead.v[i]) * (p.w[i] + b.min(1.0) * ahead.w[i]))
                .sum();
            let centre = (then / product).powi(3) * mu;
            let towards: Vec<f64> = (0..p.v.len())
                .map(|i| centre - p.v[i] * p.w[i] - ahead.v[i] * ahead.w[i])
                .collect();
            let Some(step) = self.direction(&p, &factor, &gaps, &slopes, &towards) else { break };
            let (a, b) = (0.99 * self.reach(&p.v, &step.v), 0.99 * self.reach(&p.w, &step.w));
            add(&mut p.v, &step.v, a.min(1.0));
            add(&mut p.w, &step.w, b.min(1.0));
            add(&mut p.y, &step.y, b.min(1.0));
        }
        good
    }

    /// How far one can go until the first value is 0, at most a bit more than all the way.
    fn reach(&self, values: &[f64], change: &[f64]) -> f64 {
        let stops = (0..values.len()).filter(|i| self.exists[*i] && change[*i] < 0.0);
        stops.map(|i| -values[i] / change[i]).fold(1.0 / 0.99, f64::min)
    }

    /// The system of the supplies and q, from which every party's own two rows are eliminated. Sums of
    /// positive terms throughout: close to the answer, differences of large numbers would be noise.
    fn factor(&self, p: &Point) -> Option<Factor> {
        let parties = &self.program.parties;
        let (goods, stride, size) = (self.goods, self.stride(), self.goods + 1);
        let ratio: Vec<f64> =
            (0..p.v.len()).map(|i| if self.exists[i] { p.v[i] / p.w[i] } else { 0.0 }).collect();
        let mut system = vec![0.0; size * size];
        for j in 0..goods {
            let left = self.left() + j;
            system[j * size + j] = if self.exists[left] { ratio[left] } else { 1.0 };
        }
        system[goods * size + goods] = -1.0 / ratio[self.q()];
        let mut inverse = Vec::with_capacity(parties.len());
        let mut passed = Vec::with_capacity(parties.len() * goods);
        for (m, party) in parties.iter().enumerate() {
            let d = &ratio[m * stride..][..stride];
            let rows = Rows::new(party, d, goods)?;
            let s = party.size;
            for i in 0..goods {
                system[i * size + i] += s * s * d[i] * rows.without(i) / rows.det;
                for j in 0..i {
                    let both = s * s * d[i] * d[j] * rows.between(i, j) / rows.det;
                    system[i * size + j] -= both;
                    system[j * size + i] -= both;
                }
                let by = s * d[i] / rows.det;
                let pass = [by * rows.goal_of(i), by * rows.unit_of(i)];
                system[i * size + goods] += pass[0] * party.need;
                system[goods * size + i] += pass[0] * party.need;
                passed.push(pass);
            }
            let mut own = [rows.goal, rows.cross, rows.unit].map(|x| x / rows.det);
            if !party.has_goal() {
                own = [1.0 / rows.unit, 0.0, 0.0];
            }
            system[goods * size + goods] -= party.need * party.need * own[2];
            inverse.push(own);
        }
        Some(Factor { ratio, system, inverse, passed })
    }

    /// The step that closes the gaps of the rows and of the duals, and brings every product of a value
    /// and its dual `towards` where it should be.
    fn direction(
        &self,
        p: &Point,
        factor: &Factor,
        gaps: &[f64],
        slopes: &[f64],
        towards: &[f64],
    ) -> Option<Point> {
        let mut step = self.eliminate(p, factor, gaps, slopes, towards)?;
        // What rounding left open of the rows is closed by a second, small step.
        for _ in 0..2 {
            let there: Vec<f64> = p.v.iter().zip(&step.v).map(|(v, d)| v + d).collect();
            let open = self.row_gaps(&there);
            if largest(&open) < 1e-3 * PRECISION {
                break;
            }
            let none = vec![0.0; p.v.len()];
            let more = self.eliminate(p, factor, &open, &none, &none)?;
            add(&mut step.v, &more.v, 1.0);
            add(&mut step.w, &more.w, 1.0);
            add(&mut step.y, &more.y, 1.0);
        }
        Some(step)
    }

    fn eliminate(
        &self,
        p: &Point,
        factor: &Factor,
        gaps: &[f64],
        slopes: &[f64],
        towards: &[f64],
    ) -> Option<Point> {
        let parties = &self.program.parties;
        let (goods, stride, q) = (self.goods, self.stride(), self.q());
        let Factor { ratio, system, inverse, passed } = factor;
        let own = |i: usize| {
            if self.exists[i] { towards[i] / p.w[i] - ratio[i] * slopes[i] } else { 0.0 }
        };
        let mut right: Vec<f64> = (0..goods)
            .map(|j| gaps[2 * parties.len() + j] - own(self.left() + j))
            .chain([slopes[q] - towards[q] / p.v[q]])
            .collect();
        let mut rest: Vec<[f64; 2]> = Vec::with_capacity(parties.len());
        for (m, party) in parties.iter().enumerate() {
            let at = m * stride;
            let mut h = [gaps[2 * m] + own(at + goods), gaps[2 * m + 1] - own(at + goods + 1)];
            for (j, worth) in party.worth.iter().enumerate() {
                let o = own(at + j);
                h[0] -= worth * o;
                h[1] -= o;
                right[j] -= party.size * o;
            }
            if !party.has_goal() {
                h[0] = 0.0;
            }
            rest.push(h);
            for (right, [goal, unit]) in right.iter_mut().zip(&passed[m * goods..][..goods]) {
                *right -= goal * h[0] + unit * h[1];
            }
            let [_, cross, unit] = inverse[m];
            right[goods] += party.need * (unit * h[0] - cross * h[1]);
        }
        let common = gauss(system.clone(), right)?;
        let mut dy = Vec::with_capacity(p.y.len());
        for (m, party) in parties.iter().enumerate() {
            let at = m * stride;
            let [mut g, mut u] = rest[m];
            for j in 0..goods {
                let d = ratio[at + j] * party.size * common[j];
                g -= d * party.worth[j];
                u -= d;
            }
            g += party.need * common[goods];
            if !party.has_goal() {
                g = 0.0;
            }
            let [goal, cross, unit] = inverse[m];
            dy.extend([unit * g - cross * u, goal * u - cross * g]);
        }
        dy.extend_from_slice(&common[..goods]);
        let asked = self.asked(&dy);
        let mut dw: Vec<f64> = Vec::with_capacity(p.v.len());
        let mut dv: Vec<f64> = Vec::with_capacity(p.v.len());
        for i in 0..p.v.len() {
            let exists = f64::from(u8::from(self.exists[i]));
            dw.push(exists * (slopes[i] - asked[i]));
            dv.push(exists * (towards[i] - p.v[i] * dw[i]) / p.w[i]);
        }
        Some(Point { v: dv, w: dw, y: dy })
    }

    fn answer(&self, p: &Point) -> Shared {
        let rows = (0..self.program.parties.len()).map(|m| m * self.stride());
        let amount = |x: &f64| x.clamp(0.0, 1.0);
        let amounts = rows.clone().map(|at| p.v[at..at + self.goods].iter().map(amount).collect());
        // Of a goal that binds, what is beyond it goes to 0 and its dual does not; of others, conversely.
        let binds = |at: usize| p.w[at + self.goods] > p.v[at + self.goods];
        let value = match self.program.gains {
            Some(_) => -dot(&self.cost[..self.left()], &p.v[..self.left()]),
            None => p.v[self.q()],
        };
        Shared { amounts: amounts.collect(), value, binds: rows.map(binds).collect() }
    }
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |m: f64, x| if x.is_nan() { f64::NAN } else { m.max(x.abs()) })
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

fn add(to: &mut [f64], change: &[f64], times: f64) {
    to.iter_mut().zip(change).for_each(|(t, c)| *t += times * c);
}

/// Solves a small dense system by elimination with pivots.
fn gauss(mut a: Vec<f64>, mut b: Vec<f64>) -> Option<Vec<f64>> {
    let n = b.len();
    for i in 0..n {
        let pivot = (i..n).max_by(|x, y| a[x * n + i].abs().total_cmp(&a[y * n + i].abs()))?;
        if a[pivot * n + i] == 0.0 || !a[pivot * n + i].is_finite() {
            return None;
        }
        if pivot != i {
            for j in 0..n {
                a.swap(i * n + j, pivot * n + j);
            }
            b.swap(i, pivot);
        }
        for r in i + 1..n {
            let by = a[r * n + i] / a[i * n + i];
            for j in i..n {
                a[r * n + j] -= by * a[i * n + j];
            }
            b[r] -= by * b[i];
        }
    }
    for i in (0..n).rev() {
        let known: f64 = (i + 1..n).map(|j| a[i * n + j] * b[j]).sum();
        b[i] = (b[i] - known) / a[i * n + i];
    }
    Some(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::lp::{Cmp, Lp};
    use proptest::prelude::*;

    fn party(worth: &[f64], size: f64, need: f64) -> Party {
        Party { worth: ByGood::from_slice(worth), size, need, floor: 0.0 }
    }

    #[test]
    fn equals_share_equally() {
        let parties = vec![party(&[1.0, 1.0], 1.0, 1.0); 4];
        let supply = ByGood::from_slice(&[1.0, 1.0]);
        let shared = Sharing { supply, parties, gains: None }.solve().unwrap();
        assert!((shared.value - 0.5).abs() < 1e-6);
        assert!(shared.amounts.iter().flatten().all(|x| (x - 0.25).abs() < 1e-4));
        assert_eq!(shared.binds, [true; 4]);
    }

    #[test]
    fn who_holds_the_others_down_is_told() {
        let parties = vec![
            party(&[1.0, 0.0], 1.0, 1.0),
            party(&[0.0, 1.0], 1.0, 1.0),
            party(&[0.0, 1.0], 1.0, 1.0),
        ];
        let supply = ByGood::from_slice(&[1.0, 1.0]);
        let shared = Sharing { supply, parties, gains: None }.solve().unwrap();
        assert!((shared.value - 0.5).abs() < 1e-6);
        assert_eq!(shared.binds, [false, true, true]);
    }

    #[test]
    fn nonsense_has_no_answer() {
        let supply = ByGood::from_slice(&[1.0]);
        let mut greedy = party(&[1.0], 1.0, 1.0);
        greedy.floor = 2.0;
        let parties = vec![greedy];
        assert!(Sharing { supply: supply.clone(), parties, gains: None }.solve().is_none());
        let parties = vec![party(&[f64::NAN], 1.0, 1.0)];
        assert!(Sharing { supply, parties, gains: None }.solve().is_none());
    }

    /// The same program for any solver.
    fn twin(sharing: &Sharing) -> Option<f64> {
        let mut lp = Lp::maximize();
        let q = lp.var(if sharing.gains.is_none() { 1.0 } else { 0.0 }, 0.0, f64::INFINITY);
        let mut used = vec![Vec::new(); sharing.supply.len()];
        for (m, party) in sharing.parties.iter().enumerate() {
            let mut goal = vec![(q, -party.need)];
            let mut unit = Vec::new();
            for (j, worth) in party.worth.iter().enumerate().filter(|(_, w)| **w > 0.0) {
                let gain = sharing.gains.as_ref().map_or(0.0, |g| g[m][j]);
                let x = lp.var(gain, 0.0, f64::INFINITY);
                goal.push((x, *worth));
                unit.push((x, 1.0));
                used[j].push((x, party.size));
            }
            lp.row(goal, Cmp::Ge, party.floor);
            lp.row(unit, Cmp::Le, 1.0);
        }
        for (used, supply) in used.into_iter().zip(&sharing.supply) {
            lp.row(used, Cmp::Le, *supply);
        }
        lp.solve().solution().map(|s| s.objective)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]
        #[test]
        fn it_is_as_good_as_a_solver_for_any_shape(
            supply in prop::collection::vec(1u8..9, 1..4),
            parties in prop::collection::vec((prop::collection::vec(0u8..9, 3), 1u8..4, 1u16..900, 0u8..4), 1..14),
            sum in any::<bool>(),
        ) {
            let goods = supply.len();
            let supply: ByGood = supply.into_iter().map(f64::from).collect();
            let parties: Vec<Party> = parties.into_iter().map(|(worth, size, need, floor)| {
                let mut worth: ByGood = worth[..goods].iter().map(|w| f64::from(*w) / 8.0).collect();
                worth[0] = worth[0].max(0.125);
                // Floors that an equal part of the first good reaches.
                let floor = f64::from(floor) * 1e-3;
                Party { worth, size: f64::from(size), need: f64::from(need) / 900.0, floor }
            }).collect();
            let gains = sum.then(|| parties.iter().map(|p| p.worth.clone()).collect());
            let sharing = Sharing { supply, parties, gains };
            let shared = sharing.solve().expect("there are shares");
            let best = twin(&sharing).expect("there are shares");
            prop_assert!((shared.value - best).abs() < 1e-5 * (1.0 + best), "{} {best}", shared.value);
            let mut used = vec![0.0; goods];
            for (party, amounts) in sharing.parties.iter().zip(&shared.amounts) {
                prop_assert!(amounts.iter().sum::<f64>() < 1.0 + 1e-6);
                (0..goods).for_each(|j| used[j] += amounts[j] * party.size);
            }
            prop_assert!(used.iter().zip(&sharing.supply).all(|(u, n)| *u < n + 1e-5));
        }
    }
}
