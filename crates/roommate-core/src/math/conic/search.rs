//! The search: from a start inside all cones along the central path to the solution.

use super::second_order::Scaling;
use super::system::{Direction, System};
use super::{Answer, EXACT, Program, Shape, add, norm, weighed};

const MAX_STEPS: usize = 100;
/// Feasibility and gap that are accepted if no further progress is possible.
const ROUGHLY: [f64; 2] = [1e-4, 5e-5];
/// Share of the distance to the boundary that a step takes.
pub(super) const BOLDNESS: f64 = 0.99;
const SHORTEST_STEP: f64 = 1e-6;
const LONGEST_STEP: f64 = 0.999;
const LEAST_CENTRING: f64 = 1e-4;
/// Growth of the residual by which a step is recognised as bad.
const BAD_STEP: f64 = 500.0;

/// A point of the embedding: `x`, `s` and `z` are to be divided by `tau`.
#[derive(Clone, Debug)]
struct Point {
    x: Vec<f64>,
    s: Vec<f64>,
    z: Vec<f64>,
    kappa: f64,
    tau: f64,
}

/// Quality of a point.
#[derive(Clone, Copy, Debug)]
struct Quality {
    gap: f64,
    relative_gap: f64,
    mu: f64,
    primal: f64,
    dual: f64,
    /// Residual of the certificate of infeasibility; NaN if the point is not one.
    no_answer: f64,
    no_bound: f64,
    cost: f64,
    worth: f64,
    kappa: f64,
    tau: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Best,
    None,
}

impl Quality {
    fn verdict(&self, feasible: f64, gap: f64) -> Option<Verdict> {
        let sane = self.cost < 0.0 || self.worth >= -gap;
        let close = self.gap < gap || self.relative_gap < gap;
        if sane && self.primal < feasible && self.dual < feasible && close {
            return Some(Verdict::Best);
        }
        let open = self.tau < self.kappa;
        let vanished = self.tau < EXACT && self.kappa < EXACT;
        let unbounded = self.no_bound < feasible && open;
        let impossible =
            (self.no_answer < feasible && open) || (vanished && self.no_answer < EXACT);
        (unbounded || impossible).then_some(Verdict::None)
    }

    /// Whether it is better than the best so far in all criteria.
    fn beats(&self, best: &Self) -> bool {
        let less = |a: f64, b: f64| a > 0.0 && a < b;
        let closer = less(self.gap, best.gap) && less(self.mu, best.mu);
        if !self.no_answer.is_nan() && self.kappa > self.tau {
            return closer && (best.no_answer.is_nan() || less(self.no_answer, best.primal));
        }
        let open = less(self.kappa / self.tau, best.kappa / best.tau);
        closer && less(self.primal, best.primal) && less(self.dual, best.dual) && open
    }
}

pub(super) struct Search {
    program: Program,
    var_divisors: Vec<f64>,
    row_divisors: Vec<f64>,
    /// How many variables and rows of the whole program each of these stands for.
    var_counts: Vec<f64>,
    row_counts: Vec<f64>,
    /// Number of signs and cones of the whole program.
    degree: f64,
    cost_size: f64,
    bound_size: f64,
}

impl Search {
    pub(super) fn new(mut program: Program) -> Self {
        let (var_divisors, row_divisors) = program.balance();
        let mut var_counts = vec![1.0; program.costs.len()];
        let mut row_counts = vec![1.0; program.bounds.len()];
        let mut degree = program.links.iter().map(|l| l.count).sum::<f64>();
        for block in &program.blocks {
            let Shape { rows, cone } = program.shape;
            let signs = program.signed(block) + rows;
            var_counts[block.var as usize..][..block.width as usize].fill(block.count);
            let rows = signs + if cone { 3 } else { 0 };
            row_counts[block.row as usize..][..rows].fill(block.count);
            degree += (signs + usize::from(cone)) as f64 * block.count;
        }
        let first_link = program.first_link();
        for (count, link) in row_counts[first_link..].iter_mut().zip(&program.links) {
            *count = link.count;
        }
        let cost_size = norm(&program.costs, &var_counts).max(1.0);
        let bound_size = norm(&program.bounds, &row_counts).max(1.0);
        Self {
            program,
            var_divisors,
            row_divisors,
            var_counts,
            row_counts,
            degree,
            cost_size,
            bound_size,
        }
    }

    pub(super) fn run(&self, precision: f64) -> Option<Answer> {
        let p = &self.program;
        let (vars, rows) = (p.costs.len(), p.bounds.len());
        let mut system = System::new(p);
        let mut scaling = Scaling::new(p);
        let mut point = self.start(&mut system, &scaling)?;
        let minus_costs: Vec<f64> = p.costs.iter().map(|c| -c).collect();
        let mut best: Option<(Quality, Point)> = None;
        let mut before = f64::NAN;
        let mut step = 0.0;
        let (mut rx, mut rz) = (vec![0.0; vars], vec![0.0; rows]);
        let mut fixed = Direction { x: vec![0.0; vars], z: vec![0.0; rows] };
        let mut ahead = Direction { x: vec![0.0; vars], z: vec![0.0; rows] };
        let mut right = vec![0.0; rows];
        let (mut scaled_s, mut scaled_z) = (vec![0.0; rows], vec![0.0; rows]);
        let mut lambda = vec![0.0; rows];
        let mut divided = vec![0.0; rows];
        for round in 0..=MAX_STEPS {
            let quality = self.quality(&point, &mut rx, &mut rz);
            if round > 0 && (quality.primal > BAD_STEP * before || quality.gap < 0.0) {
                return self.roughly(best);
            }
            before = quality.primal;
            match quality.verdict(precision, precision) {
                Some(Verdict::Best) => return Some(self.answer(&point, true)),
                Some(Verdict::None) => return None,
                None => {}
            }
            let stuck = round > 0 && step <= SHORTEST_STEP * BOLDNESS;
            let lost = round == MAX_STEPS || quality.cost.is_nan();
            let better = best.as_ref().is_none_or(|(b, _)| quality.beats(b));
            if better && !stuck {
                match &mut best {
                    Some((q, p)) => (*q, ()) = (quality, p.clone_from(&point)),
                    none => *none = Some((quality, point.clone())),
                }
            }
            if stuck || lost || !scaling.update(p, &point.s, &point.z, &mut lambda) {
                return self.roughly(best);
            }
            system.factor(p, &scaling);
            system.solve(p, &scaling, &minus_costs, &p.bounds, &mut fixed);

            // Predictor: the affine direction.
            for (right, (s, rz)) in right.iter_mut().zip(point.s.iter().zip(&rz)) {
                *right = s - rz;
            }
            system.predict(p, &scaling, &rx, &right, &mut ahead);
            let Point { kappa, tau, .. } = point;
            let slope = kappa / tau - self.worth(&fixed);
            let missing = kappa + self.worth_at(&point);
            let d_tau = (missing - kappa + self.worth(&ahead)) / slope;
            add(&mut ahead.z, &fixed.z, d_tau);
            scaling.times(p, &ahead.z, &mut scaled_z);
            for (s, (z, lambda)) in scaled_s.iter_mut().zip(scaled_z.iter().zip(&lambda)) {
                *s = -z - lambda;
            }
            let d_kappa = -kappa - kappa / tau * d_tau;
            let reach = |s: &[f64], z: &[f64], d_tau: f64, d_kappa: f64| {
                let ends = [-tau / d_tau, -kappa / d_kappa].into_iter().filter(|a| *a > 0.0);
                let reach = scaling.reach(p, &lambda, s, z);
                ends.fold(reach, f64::min).clamp(SHORTEST_STEP, LONGEST_STEP)
            };
            let there = reach(&scaled_s, &scaled_z, d_tau, d_kappa);
            let centring = (1.0 - there).powi(3).clamp(LEAST_CENTRING, 1.0);

            // Corrector: with centring.
            let mu = centring * quality.mu;
            scaling.corrected(p, &lambda, &scaled_s, &scaled_z, mu, &mut divided);
            scaling.times(p, &divided, &mut right);
            for (right, rz) in right.iter_mut().zip(&rz) {
                *right -= (1.0 - centring) * rz;
            }
            rx.iter_mut().for_each(|r| *r *= 1.0 - centring);
            system.solve(p, &scaling, &rx, &right, &mut ahead);
            let product = kappa * tau + d_kappa * d_tau - mu;
            let d_tau = ((1.0 - centring) * missing - product / tau + self.worth(&ahead)) / slope;
            add(&mut ahead.x, &fixed.x, d_tau);
            add(&mut ahead.z, &fixed.z, d_tau);
            scaling.times(p, &ahead.z, &mut scaled_z);
            for (s, (z, divided)) in scaled_s.iter_mut().zip(scaled_z.iter().zip(&divided)) {
                *s = -(divided + z);
            }
            let d_kappa = -(product + kappa * d_tau) / tau;
            step = BOLDNESS * reach(&scaled_s, &scaled_z, d_tau, d_kappa);
            scaling.times(p, &scaled_s, &mut right);
            add(&mut point.x, &ahead.x, step);
            add(&mut point.z, &ahead.z, step);
            add(&mut point.s, &right, step);
            point.kappa += step * d_kappa;
            point.tau += step * d_tau;
        }
        None
    }

    /// The least-squares point and the smallest duals, both moved inside the cones.
    fn start(&self, system: &mut System, plain: &Scaling) -> Option<Point> {
        let p = &self.program;
        let (vars, rows) = (p.costs.len(), p.bounds.len());
        system.factor(p, plain);
        let mut found = Direction { x: vec![0.0; vars], z: vec![0.0; rows] };
        system.solve(p, plain, &vec![0.0; vars], &p.bounds, &mut found);
        let x = found.x.clone();
        let mut s: Vec<f64> = found.z.iter().map(|z| -z).collect();
        plain.bring_inside(p, &mut s);
        let minus_costs: Vec<f64> = p.costs.iter().map(|c| -c).collect();
        system.solve(p, plain, &minus_costs, &vec![0.0; rows], &mut found);
        let mut z = found.z;
        plain.bring_inside(p, &mut z);
        let finite = |v: &[f64]| v.iter().all(|x| x.is_finite());
        let sane = finite(&x) && finite(&s) && finite(&z);
        sane.then_some(Point { x, s, z, kappa: 1.0, tau: 1.0 })
    }

    /// `c · x + h · z`.
    fn worth(&self, d: &Direction) -> f64 {
        let Program { costs, bounds, .. } = &self.program;
        weighed(&self.var_counts, costs, &d.x) + weighed(&self.row_counts, bounds, &d.z)
    }

    fn worth_at(&self, p: &Point) -> f64 {
        let Program { costs, bounds, .. } = &self.program;
        weighed(&self.var_counts, costs, &p.x) + weighed(&self.row_counts, bounds, &p.z)
    }

    fn quality(&self, point: &Point, rx: &mut [f64], rz: &mut [f64]) -> Quality {
        let p = &self.program;
        let (by_var, by_row) = (&self.var_counts, &self.row_counts);
        let Point { x, s, z, kappa, tau } = point;
        p.times_transposed(z, rx);
        rx.iter_mut().for_each(|r| *r = -*r);
        let dual_open = norm(rx, by_var);
        add(rx, &p.costs, -tau);
        p.times(x, rz);
        add(rz, s, 1.0);
        let primal_open = norm(rz, by_row);
        add(rz, &p.bounds, -tau);
        let cost = weighed(by_var, &p.costs, x);
        let worth = -weighed(by_row, &p.bounds, z);
        let (nx, ns, nz) = (norm(x, by_var), norm(s, by_row), norm(z, by_row));
        let gap = weighed(by_row, s, z);
        let relative_gap = if cost / tau < 0.0 {
            -gap / (cost / tau)
        } else if worth / tau > 0.0 {
            gap / (worth / tau)
        } else {
            f64::NAN
        };
        let if_below = |v: f64, then: f64| if v < -EXACT { then } else { f64::NAN };
        Quality {
            gap,
            relative_gap,
            mu: (gap + kappa * tau) / (self.degree + 1.0),
            primal: norm(rz, by_row) / (self.bound_size + nx + ns).max(1.0) / tau,
            dual: norm(rx, by_var) / (self.cost_size + nz).max(1.0) / tau,
            no_answer: if_below(-worth / nz.max(1.0), dual_open / nz.max(1.0)),
            no_bound: if_below(cost / nx.max(1.0), primal_open / (nx + ns).max(1.0)),
            cost,
            worth,
            kappa: *kappa,
            tau: *tau,
        }
    }

    /// The approximate solution when no further progress is possible.
    fn roughly(&self, best: Option<(Quality, Point)>) -> Option<Answer> {
        let (quality, point) = best?;
        let verdict = quality.verdict(ROUGHLY[0], ROUGHLY[1]);
        (verdict == Some(Verdict::Best)).then(|| self.answer(&point, false))
    }

    fn answer(&self, point: &Point, exact: bool) -> Answer {
        let p = &self.program;
        let value = |(x, d): (&f64, &f64)| x / (d * point.tau);
        let values = point.x.iter().zip(&self.var_divisors).map(value).collect();
        let row = |row: usize| {
            let (s, z, d) = (point.s[row], point.z[row], self.row_divisors[row]);
            (s * d / point.tau, z / (d * point.tau))
        };
        let rows =
            p.blocks.iter().flat_map(|b| p.rows_of(b, b.width as usize).map(|(i, _)| row(i)));
        let links = (p.first_link()..p.bounds.len()).map(|i| row(i).1);
        Answer { values, rows: rows.collect(), links: links.collect(), exact }
    }
}
