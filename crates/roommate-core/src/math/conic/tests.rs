use super::{Answer, EXACT, Link, Program, Shape};
use crate::math::lp::{Cmp, Lp};
use proptest::prelude::*;

/// Parties that share goods: the value of each good to each party, its size, its need per unit of
/// the common q, and its minimum; the objective is the largest q, or the largest total value.
struct Sharing {
    supply: Vec<f64>,
    parties: Vec<(Vec<f64>, f64, f64, f64)>,
    sum: bool,
}

impl Sharing {
    fn equal(supply: &[f64], worth: &[&[f64]]) -> Self {
        let party = |w: &&[f64]| (w.to_vec(), 1.0, 1.0, 0.0);
        Self { supply: supply.to_vec(), parties: worth.iter().map(party).collect(), sum: false }
    }

    /// Every party `count` times.
    fn program(&self, count: f64) -> Program {
        let link = |n: &f64| Link { count: 1.0, common: 0.0, bound: *n };
        let links = self.supply.iter().map(link).collect();
        let shape = Shape { rows: 2, cone: false };
        let mut program = Program::new(shape, links, if self.sum { 0.0 } else { 1.0 });
        for (worth, size, need, floor) in &self.parties {
            let used: Vec<usize> = (0..worth.len()).filter(|j| worth[*j] > 0.0).collect();
            let by = |factor: f64| used.iter().map(|j| factor * worth[*j]).collect::<Vec<f64>>();
            program.block(count, &by(if self.sum { -1.0 } else { 0.0 }));
            program.row(&vec![1.0; used.len()], 0.0, 1.0);
            program.row(&by(-1.0), if self.sum { 0.0 } else { -need }, -floor);
            for (j, good) in used.iter().enumerate() {
                program.link(j, *good, *size, count);
            }
        }
        program
    }

    fn value(&self, answer: &Answer) -> f64 {
        if !self.sum {
            return -answer.values.last().unwrap();
        }
        let worth = self.parties.iter().flat_map(|p| p.0.iter().filter(|w| **w > 0.0));
        worth.zip(&answer.values).map(|(w, x)| w * x).sum()
    }

    /// The same by a solver for programs of any shape.
    fn twin(&self) -> Option<f64> {
        let mut lp = Lp::maximize();
        let q = lp.var(if self.sum { 0.0 } else { 1.0 }, 0.0, f64::INFINITY);
        let mut used = vec![Vec::new(); self.supply.len()];
        for (worth, size, need, floor) in &self.parties {
            let mut goal = vec![(q, if self.sum { 0.0 } else { -need })];
            let mut unit = Vec::new();
            for (j, worth) in worth.iter().enumerate().filter(|(_, w)| **w > 0.0) {
                let x = lp.var(if self.sum { *worth } else { 0.0 }, 0.0, f64::INFINITY);
                goal.push((x, *worth));
                unit.push((x, 1.0));
                used[j].push((x, *size));
            }
            lp.row(goal, Cmp::Ge, *floor);
            lp.row(unit, Cmp::Le, 1.0);
        }
        for (used, supply) in used.into_iter().zip(&self.supply) {
            lp.row(used, Cmp::Le, *supply);
        }
        lp.solve().solution().map(|s| s.objective)
    }
}

#[test]
fn equals_share_equally() {
    let four = Sharing::equal(&[1.0, 1.0], &[&[1.0, 1.0][..]; 4]);
    let answer = four.program(1.0).solve(EXACT).unwrap();
    assert!(answer.exact);
    assert!((four.value(&answer) - 0.5).abs() < 1e-7);
    assert!(answer.values[..8].iter().all(|x| (x - 0.25).abs() < 1e-6), "{answer:?}");
}

#[test]
fn duals_show_which_parties_limit_the_objective() {
    let three = Sharing::equal(&[1.0, 1.0], &[&[1.0, 0.0], &[0.0, 1.0], &[0.0, 1.0]]);
    let answer = three.program(1.0).solve(EXACT).unwrap();
    assert!((three.value(&answer) - 0.5).abs() < 1e-7);
    let goals = answer.rows.chunks(2).map(|rows| rows[1]);
    let binds: Vec<bool> = goals.map(|(beyond, price)| price > beyond).collect();
    assert_eq!(binds, [false, true, true]);
}

#[test]
fn infeasible_and_unbounded_programs_have_no_solution() {
    let mut greedy = Sharing::equal(&[1.0], &[&[1.0]]);
    (greedy.parties[0].3, greedy.sum) = (2.0, true);
    assert!(greedy.program(1.0).solve(EXACT).is_none());
    let unknown = Sharing::equal(&[f64::NAN], &[&[1.0]]);
    assert!(unknown.program(1.0).solve(EXACT).is_none());
    let mut endless = Program::new(Shape { rows: 0, cone: false }, Vec::new(), 0.0);
    assert!(endless.clone().solve(EXACT).is_none(), "no blocks");
    endless.block(1.0, &[-1.0]);
    assert!(endless.solve(EXACT).is_none(), "no bound");
}

/// Jobs that share one good, with speed in proportion to the amount; the largest of need ÷ speed is
/// minimised.
fn slowest(needs: &[f64], count: f64) -> Answer {
    let links = vec![Link { count: 1.0, common: 0.0, bound: 1.0 }];
    let mut program = Program::new(Shape { rows: 1, cone: true }, links, 1.0);
    for need in needs {
        program.block(count, &[0.0, 0.0]);
        program.row(&[0.0, *need], -1.0, 0.0);
        program.inverse(&[1.0]);
        program.link(0, 0, 1.0, count);
    }
    program.solve(EXACT).unwrap()
}

#[test]
fn a_cone_stands_for_an_inverse() {
    // With 1 : 3 of the good both take 4.
    let answer = slowest(&[1.0, 3.0], 1.0);
    let expected = [0.25, 4.0, 0.75, 4.0 / 3.0, 4.0];
    for (found, expected) in answer.values.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-6, "{answer:?}");
    }
}

#[test]
fn a_number_stands_for_equal_blocks() {
    let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a} {b}");
    let twice = slowest(&[1.0, 3.0, 1.0, 3.0], 1.0);
    for (one, two) in slowest(&[1.0, 3.0], 2.0).values.iter().take(4).zip(&twice.values) {
        near(*one, *two);
    }
    let worth: [&[f64]; 3] = [&[1.0, 2.0, 4.0], &[1.0, 1.5, 2.0], &[1.0, 3.0, 10.0]];
    let three = Sharing::equal(&[1.0, 1.0, 1.0], &worth);
    let six = Sharing::equal(&[1.0, 1.0, 1.0], &[worth, worth].concat());
    let one = three.program(2.0).solve(EXACT).unwrap();
    let two = six.program(1.0).solve(EXACT).unwrap();
    for (one, two) in one.values.iter().take(9).zip(&two.values) {
        near(*one, *two);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn it_is_as_good_as_a_solver_for_any_shape(
        supply in prop::collection::vec(1u8..9, 1..4),
        parties in prop::collection::vec(
            (prop::collection::vec(0u8..9, 3), 1u8..4, 1u16..900, 0u8..4), 1..14),
        sum in any::<bool>(),
    ) {
        let goods = supply.len();
        let supply: Vec<f64> = supply.into_iter().map(f64::from).collect();
        let parties = parties.into_iter().map(|(worth, size, need, floor)| {
            let mut worth: Vec<f64> = worth[..goods].iter().map(|w| f64::from(*w) / 8.0).collect();
            worth[0] = worth[0].max(0.125);
            // Minimums that an equal share of the first good satisfies.
            (worth, f64::from(size), f64::from(need) / 900.0, f64::from(floor) * 1e-3)
        });
        let sharing = Sharing { supply, parties: parties.collect(), sum };
        let answer = sharing.program(1.0).solve(EXACT).expect("there are shares");
        let best = sharing.twin().expect("there are shares");
        let value = sharing.value(&answer);
        prop_assert!((value - best).abs() < 1e-6 * (1.0 + best), "{value} {best}");
        let mut used = vec![0.0; goods];
        let mut values = answer.values.iter();
        for (worth, size, ..) in &sharing.parties {
            let mut all = 0.0;
            for (j, _) in worth.iter().enumerate().filter(|(_, w)| **w > 0.0) {
                let x = values.next().unwrap();
                prop_assert!(*x > -1e-7);
                all += x;
                used[j] += x * size;
            }
            prop_assert!(all < 1.0 + 1e-7);
        }
        prop_assert!(used.iter().zip(&sharing.supply).all(|(u, n)| *u < n + 1e-6));
    }
}
