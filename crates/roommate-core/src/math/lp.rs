//! Linear programs, with or without integer variables.
//!
//! A thin wrapper around a simplex solver: failures are answers and not errors, because a policy
//! has to decide something in any case. The same program always gives the same answer; no clock is
//! involved, so a limit on effort counts nodes of the search, not seconds.

use microlp::{ComparisonOp, Error, OptimizationDirection, Problem, SolveOptions, Variable};

/// A variable of one program.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Var(u32);

/// How the left side of a row compares with the right.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cmp {
    /// At most.
    Le,
    /// Equal.
    Eq,
    /// At least.
    Ge,
}

/// The result of a program.
#[derive(Clone, PartialEq, Debug)]
pub enum Answer {
    /// The optimal values.
    Optimal(Solution),
    /// With integer variables: the best values found before the limit on nodes.
    Feasible(Solution),
    /// No values meet all rows and bounds.
    Infeasible,
    /// The objective has no upper limit.
    Unbounded,
    /// The solver found nothing before its limit, or failed numerically.
    GaveUp,
}

/// Values of all variables.
#[derive(Clone, PartialEq, Debug)]
pub struct Solution {
    /// Value of the objective.
    pub objective: f64,
    values: Vec<f64>,
}

impl Solution {
    /// The value of a variable.
    pub fn value(&self, var: Var) -> f64 {
        self.values[var.0 as usize]
    }
}

impl Answer {
    /// The values, proved optimal or not.
    pub fn solution(self) -> Option<Solution> {
        match self {
            Self::Optimal(s) | Self::Feasible(s) => Some(s),
            Self::Infeasible | Self::Unbounded | Self::GaveUp => None,
        }
    }
}

/// A program under construction.
#[derive(Clone, Debug)]
pub struct Lp {
    problem: Problem,
    vars: Vec<Variable>,
    /// Whether a coefficient or bound was not a valid number.
    broken: bool,
    node_limit: Option<u64>,
}

impl Lp {
    /// A program that maximizes its objective.
    pub fn maximize() -> Self {
        let problem = Problem::new(OptimizationDirection::Maximize);
        Self { problem, vars: Vec::new(), broken: false, node_limit: None }
    }

    /// A variable from `lower` to `upper` (infinite = no bound), with objective coefficient `gain`.
    pub fn var(&mut self, gain: f64, lower: f64, upper: f64) -> Var {
        self.broken |= !gain.is_finite() || lower.is_nan() || upper.is_nan();
        self.broken |= lower == f64::INFINITY || upper == f64::NEG_INFINITY;
        let var = self.problem.add_var(gain, (lower, upper));
        self.enter(var)
    }

    /// An integer variable.
    pub fn whole_var(&mut self, gain: f64, lower: i32, upper: i32) -> Var {
        self.broken |= !gain.is_finite();
        let var = self.problem.add_integer_var(gain, (lower, upper));
        self.enter(var)
    }

    fn enter(&mut self, var: Variable) -> Var {
        self.vars.push(var);
        Var(self.vars.len() as u32 - 1)
    }

    /// Adds the row `Σ factor · variable` `cmp` `right`. A variable may occur more than once.
    pub fn row(&mut self, terms: impl IntoIterator<Item = (Var, f64)>, cmp: Cmp, right: f64) {
        let mut terms: Vec<(Var, f64)> = terms.into_iter().collect();
        self.broken |= !right.is_finite() || terms.iter().any(|(_, f)| !f.is_finite());
        terms.sort_by_key(|(var, _)| *var);
        terms.dedup_by(|next, kept| {
            let same = next.0 == kept.0;
            kept.1 += if same { next.1 } else { 0.0 };
            same
        });
        let op = match cmp {
            Cmp::Le => ComparisonOp::Le,
            Cmp::Eq => ComparisonOp::Eq,
            Cmp::Ge => ComparisonOp::Ge,
        };
        let terms: Vec<(Variable, f64)> =
            terms.into_iter().map(|(v, f)| (self.vars[v.0 as usize], f)).collect();
        if !self.broken {
            self.problem.add_constraint(terms, op, right);
        }
    }

    /// With integer variables: stop the search for a better solution after this many nodes.
    pub fn limit_nodes(&mut self, nodes: u64) {
        self.node_limit = Some(nodes);
    }

    /// Solves the program.
    pub fn solve(&self) -> Answer {
        if self.broken {
            return Answer::GaveUp;
        }
        let mut options = SolveOptions::default();
        options.node_limit = self.node_limit;
        let outcome = match self.problem.solve_with(options) {
            Ok(outcome) => outcome,
            Err(Error::Infeasible) => return Answer::Infeasible,
            Err(Error::Unbounded) => return Answer::Unbounded,
            Err(_) => return Answer::GaveUp,
        };
        let proved = outcome.is_optimal();
        let Ok(found) = outcome.into_solution() else { return Answer::GaveUp };
        let solution = Solution {
            objective: found.objective(),
            values: self.vars.iter().map(|v| found.var_value(*v)).collect(),
        };
        if proved { Answer::Optimal(solution) } else { Answer::Feasible(solution) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_small_program_with_and_without_whole_values() {
        let program = |whole: bool| {
            let mut lp = Lp::maximize();
            let x = lp.var(1.0, 0.0, f64::INFINITY);
            let y = if whole { lp.whole_var(2.0, 0, 9) } else { lp.var(2.0, 0.0, 9.0) };
            lp.row([(x, 1.0), (y, 1.0), (y, 1.0)], Cmp::Le, 7.0);
            lp.row([(y, 1.0)], Cmp::Le, 2.5);
            lp.row([(x, 1.0)], Cmp::Le, 1.0);
            let solution = lp.solve().solution().unwrap();
            (solution.objective, solution.value(y))
        };
        assert_eq!(program(false), (6.0, 2.5));
        assert_eq!(program(true), (5.0, 2.0));
    }

    #[test]
    fn what_cannot_be_solved_is_an_answer() {
        let mut lp = Lp::maximize();
        let x = lp.var(1.0, 0.0, f64::INFINITY);
        assert_eq!(lp.solve(), Answer::Unbounded);
        lp.row([(x, 1.0)], Cmp::Le, -1.0);
        assert_eq!(lp.solve(), Answer::Infeasible);
        lp.row([(x, f64::NAN)], Cmp::Le, 1.0);
        assert_eq!(lp.solve(), Answer::GaveUp);
        let mut lp = Lp::maximize();
        lp.var(f64::INFINITY, 0.0, 1.0);
        assert_eq!(lp.solve(), Answer::GaveUp);
        assert_eq!(Lp::maximize().solve().solution().unwrap().objective, 0.0);
    }

    /// Rows of a program as `factors · x <= right`.
    type Rows = Vec<(Vec<f64>, f64)>;

    /// The point where these rows hold with equality, if it is one.
    fn corner(rows: &Rows, chosen: &[usize]) -> Option<Vec<f64>> {
        let n = chosen.len();
        let mut m: Vec<Vec<f64>> = chosen
            .iter()
            .map(|r| rows[*r].0.iter().copied().chain([rows[*r].1]).collect())
            .collect();
        for i in 0..n {
            let pivot = (i..n).max_by(|a, b| m[*a][i].abs().total_cmp(&m[*b][i].abs()))?;
            m.swap(i, pivot);
            if m[i][i].abs() < 1e-9 {
                return None;
            }
            let row = m[i].clone();
            for other in (0..n).filter(|r| *r != i) {
                let by = m[other][i] / row[i];
                m[other].iter_mut().zip(&row).for_each(|(x, p)| *x -= by * p);
            }
        }
        Some((0..n).map(|i| m[i][n] / m[i][i]).collect())
    }

    /// The largest objective over all corners, by exhaustive search.
    fn best_corner(rows: &Rows, gains: &[f64]) -> Option<f64> {
        let n = gains.len();
        let inside = |x: &[f64]| {
            rows.iter()
                .all(|(f, right)| f.iter().zip(x).map(|(f, x)| f * x).sum::<f64>() <= right + 1e-7)
        };
        let mut best: Option<f64> = None;
        for mask in 0u32..1 << rows.len() {
            if mask.count_ones() as usize != n {
                continue;
            }
            let chosen: Vec<usize> = (0..rows.len()).filter(|r| mask >> r & 1 == 1).collect();
            if let Some(x) = corner(rows, &chosen).filter(|x| inside(x)) {
                let value = gains.iter().zip(&x).map(|(g, x)| g * x).sum::<f64>();
                best = Some(best.map_or(value, |b| b.max(value)));
            }
        }
        best
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        #[test]
        fn small_programs_have_their_best_corner(
            gains in prop::collection::vec(-5i8..=5, 1..4),
            rows in prop::collection::vec(
                (prop::collection::vec(-4i8..=4, 3), -6i8..=9, 0u8..3),
                0..5
            ),
            upper in 1u8..6,
        ) {
            let n = gains.len();
            let gains: Vec<f64> = gains.into_iter().map(f64::from).collect();
            let mut lp = Lp::maximize();
            let vars: Vec<Var> = gains.iter().map(|g| lp.var(*g, 0.0, f64::from(upper))).collect();
            let mut all: Rows = Vec::new();
            for i in 0..n {
                let unit: Vec<f64> = (0..n).map(|j| f64::from(u8::from(i == j))).collect();
                all.push((unit.iter().map(|u| -u).collect(), 0.0));
                all.push((unit, f64::from(upper)));
            }
            for (factors, right, cmp) in rows {
                let factors: Vec<f64> = factors[..n].iter().map(|f| f64::from(*f)).collect();
                let right = f64::from(right);
                let cmp = [Cmp::Le, Cmp::Ge, Cmp::Eq][usize::from(cmp)];
                lp.row(vars.iter().copied().zip(factors.iter().copied()), cmp, right);
                if cmp != Cmp::Ge {
                    all.push((factors.clone(), right));
                }
                if cmp != Cmp::Le {
                    all.push((factors.iter().map(|f| -f).collect(), -right));
                }
            }
            let answer = lp.solve();
            prop_assert_eq!(&answer, &lp.solve());
            match best_corner(&all, &gains) {
                None => prop_assert_eq!(answer, Answer::Infeasible),
                Some(best) => {
                    let found = answer.solution().expect("there is a corner").objective;
                    prop_assert!((found - best).abs() < 1e-6, "{found} {best}");
                }
            }
        }
    }
}
