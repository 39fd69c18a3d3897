//! Gradient-boosted regression trees: many small trees, each fitted to the residuals of the
//! previous ones (Friedman, 2001), for tables of a few dozen rows.
//!
//! Squared loss. Rows are put in a canonical order first, so the result does not depend on the
//! given order, not even in the last bit. Trees are complete and shallow, so that one is two small
//! arrays; those of [`crate::math::forest`] are deep and ragged, so the two share no type.

/// Parameters of a fit.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Number of trees.
    pub trees: usize,
    /// Splits between the root and a leaf, at most 3.
    pub depth: u8,
    /// Learning rate: the share of each tree's correction that is applied, above 0 and at most 1.
    pub rate: f64,
    /// Smallest number of rows in a leaf.
    pub min_leaf: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { trees: 100, depth: 2, rate: 0.1, min_leaf: 1 }
    }
}

/// A split: left if the feature is at most `at`. Trees are complete: the children of node `i` are
/// `2 i + 1` and `2 i + 2`; a node without a split sends everything left.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Question {
    feature: u16,
    at: f64,
}

const NO_QUESTION: Question = Question { feature: 0, at: f64::INFINITY };
const MAX_DEPTH: u8 = 3;
const QUESTIONS: usize = (1 << MAX_DEPTH) - 1;
const LEAVES: usize = 1 << MAX_DEPTH;

#[derive(Clone, Debug, PartialEq)]
struct Tree {
    questions: [Question; QUESTIONS],
    leaves: [f64; LEAVES],
}

impl Tree {
    fn leaf(&self, row: &[f64], depth: u8) -> usize {
        let mut at = 0;
        for _ in 0..depth {
            let Question { feature, at: limit } = self.questions[at];
            // NaN always goes right.
            let left = limit == f64::INFINITY || row[usize::from(feature)] <= limit;
            at = 2 * at + 1 + usize::from(!left);
        }
        at + 1 - (1 << depth)
    }
}

/// A fitted sum of trees.
#[derive(Clone, Debug, PartialEq)]
pub struct Boost {
    base: f64,
    rate: f64,
    depth: u8,
    trees: Vec<Tree>,
}

impl Boost {
    /// Fits rows of equal length to finite targets.
    pub fn fit(rows: &[&[f64]], targets: &[f64], options: Options) -> Self {
        assert_eq!(rows.len(), targets.len(), "every row has a target");
        assert!(options.depth <= MAX_DEPTH, "trees are at most {MAX_DEPTH} deep");
        let mut table: Vec<(&[f64], f64)> = rows.iter().copied().zip(targets.to_vec()).collect();
        table.sort_by(|a, b| {
            let mut columns = a.0.iter().zip(b.0).map(|(x, y)| x.total_cmp(y));
            columns.find(|o| o.is_ne()).unwrap_or_else(|| a.1.total_cmp(&b.1))
        });
        let mut fit = Fit::new(&table, options);
        let base = table.iter().map(|(_, y)| y).sum::<f64>() / table.len().max(1) as f64;
        fit.residuals.extend(table.iter().map(|(_, y)| y - base));
        let trees = (0..options.trees).map(|_| fit.tree()).collect();
        Self { base, rate: options.rate, depth: options.depth, trees }
    }

    /// Prediction for a row.
    pub fn predict(&self, row: &[f64]) -> f64 {
        let of = |tree: &Tree| tree.leaves[tree.leaf(row, self.depth)];
        self.base + self.rate * self.trees.iter().map(of).sum::<f64>()
    }
}

/// State and buffers of a fit.
struct Fit<'a> {
    table: &'a [(&'a [f64], f64)],
    options: Options,
    /// For each feature, the rows in order of its value.
    orders: Vec<Vec<u32>>,
    /// What the trees so far have not explained.
    residuals: Vec<f64>,
    /// The node in which each row is while a tree grows.
    nodes: Vec<u8>,
}

impl<'a> Fit<'a> {
    fn new(table: &'a [(&'a [f64], f64)], options: Options) -> Self {
        let features = table.first().map_or(0, |(row, _)| row.len());
        let order = |f: usize| {
            let mut order: Vec<u32> = (0..table.len() as u32).collect();
            order.sort_by(|a, b| table[*a as usize].0[f].total_cmp(&table[*b as usize].0[f]));
            order
        };
        let orders = (0..features).map(order).collect();
        Self { table, options, orders, residuals: Vec::new(), nodes: vec![0; table.len()] }
    }

    /// Fits the next tree and subtracts it from the residuals.
    fn tree(&mut self) -> Tree {
        let mut tree = Tree { questions: [NO_QUESTION; QUESTIONS], leaves: [0.0; LEAVES] };
        self.nodes.fill(0);
        for node in 0..(1 << self.options.depth) - 1 {
            tree.questions[node] = self.question(node as u8).unwrap_or(NO_QUESTION);
            let Question { feature, at } = tree.questions[node];
            for (here, (row, _)) in self.nodes.iter_mut().zip(self.table) {
                if usize::from(*here) == node {
                    let left = at == f64::INFINITY || row[usize::from(feature)] <= at;
                    *here = 2 * *here + 1 + u8::from(!left);
                }
            }
        }
        let first = (1 << self.options.depth) - 1;
        for (i, leaf) in tree.leaves[..1 << self.options.depth].iter_mut().enumerate() {
            let rows = self.nodes.iter().zip(&self.residuals);
            let here = rows.filter(|(n, _)| usize::from(**n) == first + i).map(|(_, r)| *r);
            let (sum, count) = here.fold((0.0, 0usize), |(s, n), r| (s + r, n + 1));
            *leaf = if count > 0 { sum / count as f64 } else { 0.0 };
        }
        for (residual, node) in self.residuals.iter_mut().zip(&self.nodes) {
            *residual -= self.options.rate * tree.leaves[usize::from(*node) - first];
        }
        tree
    }

    /// The split that leaves the least squared error in this node; the first of equals.
    fn question(&self, node: u8) -> Option<Question> {
        let here = |row: &u32| self.nodes[*row as usize] == node;
        let inside = self.nodes.iter().zip(&self.residuals).filter(|(n, _)| **n == node);
        let (total, count) = inside.fold((0.0, 0usize), |(s, n), (_, r)| (s + r, n + 1));
        let least = self.options.min_leaf.max(1);
        if count < 2 * least {
            return None;
        }
        // A split gains the sum of squares between the two means; a gain within rounding is none.
        let nothing = total * total / count as f64;
        let mut best = (nothing + 1e-12 * nothing.max(1e-12), None);
        for (feature, order) in self.orders.iter().enumerate() {
            let (mut left, mut seen) = (0.0, 0);
            let mut rows = order.iter().copied().filter(here).peekable();
            while let (Some(row), Some(next)) = (rows.next(), rows.peek()) {
                left += self.residuals[row as usize];
                seen += 1;
                let [a, b] = [row, *next].map(|r| self.table[r as usize].0[feature]);
                if seen < least || count - seen < least || !(a < b || (b.is_nan() && !a.is_nan())) {
                    continue;
                }
                let right = total - left;
                let gain = left * left / seen as f64 + right * right / (count - seen) as f64;
                if gain > best.0 {
                    best = (gain, Some(Question { feature: feature as u16, at: between(a, b) }));
                }
            }
        }
        best.1
    }
}

/// A threshold that separates two neighbours: half-way, if such a number exists.
fn between(a: f64, b: f64) -> f64 {
    let middle = f64::midpoint(a, b);
    if middle >= a && middle < b { middle } else { a }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn fit(rows: &[Vec<f64>], targets: &[f64], options: Options) -> Boost {
        let rows: Vec<&[f64]> = rows.iter().map(Vec::as_slice).collect();
        Boost::fit(&rows, targets, options)
    }

    fn loss(model: &Boost, rows: &[Vec<f64>], targets: &[f64]) -> f64 {
        rows.iter().zip(targets).map(|(x, y)| (model.predict(x) - y).powi(2)).sum()
    }

    #[test]
    fn a_step_is_one_question() {
        let rows: Vec<Vec<f64>> = (0..10).map(|i| vec![7.0, f64::from(i)]).collect();
        let targets: Vec<f64> = (0..10).map(|i| if i < 4 { 1.0 } else { 3.0 }).collect();
        let model = fit(&rows, &targets, Options { trees: 1, depth: 1, rate: 1.0, min_leaf: 1 });
        assert!(loss(&model, &rows, &targets) < 1e-24);
        assert!((model.predict(&[7.0, 3.4]) - 1.0).abs() < 1e-12);
        assert!((model.predict(&[7.0, 3.6]) - 3.0).abs() < 1e-12);
        let slow = fit(&rows, &targets, Options { trees: 200, ..Options::default() });
        assert!(loss(&slow, &rows, &targets) < 1e-12);
    }

    #[test]
    fn depth_two_learns_what_depends_on_two_features() {
        let rows: Vec<Vec<f64>> =
            (0..16).map(|i| vec![f64::from(i % 4), f64::from(i / 4)]).collect();
        let targets: Vec<f64> =
            rows.iter().map(|r| if r[0] > 1.5 && r[1] > 0.5 { 4.0 } else { 0.0 }).collect();
        let options = |depth| Options { trees: 1, depth, rate: 1.0, min_leaf: 1 };
        assert!(loss(&fit(&rows, &targets, options(2)), &rows, &targets) < 1e-24);
        assert!(loss(&fit(&rows, &targets, options(1)), &rows, &targets) > 1.0);
    }

    #[test]
    fn without_rows_it_says_zero_and_without_differences_the_mean() {
        assert_eq!(fit(&[], &[], Options::default()).predict(&[1.0]), 0.0);
        let same = vec![vec![f64::NAN]; 4];
        let model = fit(&same, &[1.0, 2.0, 3.0, 6.0], Options::default());
        assert!((model.predict(&[5.0]) - 3.0).abs() < 1e-12);
    }

    fn value() -> impl Strategy<Value = f64> {
        prop_oneof![
            8 => -1e6f64..1e6,
            4 => (0..4).prop_map(f64::from),
            1 => Just(f64::NAN),
            1 => Just(f64::INFINITY),
            1 => Just(f64::NEG_INFINITY),
            1 => Just(f64::MAX),
        ]
    }

    prop_compose! {
        fn table()(
            rows in prop::collection::vec((prop::collection::vec(value(), 3), -1e3f64..1e3), 1..20)
        ) -> (Vec<Vec<f64>>, Vec<f64>) { rows.into_iter().unzip() }
    }

    prop_compose! {
        fn options()(
            trees in 0usize..20, depth in 0u8..=3, rate in 0.05f64..=1.0, min_leaf in 1usize..4
        ) -> Options { Options { trees, depth, rate, min_leaf } }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]
        #[test]
        fn the_order_of_rows_does_not_matter(
            (rows, targets) in table(), options in options(), by in 0usize..20
        ) {
            let (mut other, mut values) = (rows.clone(), targets.clone());
            other.rotate_left(by % rows.len());
            values.rotate_left(by % rows.len());
            other.reverse();
            values.reverse();
            let (a, b) = (fit(&rows, &targets, options), fit(&other, &values, options));
            for row in &rows {
                prop_assert_eq!(a.predict(row), b.predict(row));
            }
        }

        #[test]
        fn predictions_are_never_nan(
            (rows, targets) in table(),
            options in options(),
            row in prop::collection::vec(value(), 3),
        ) {
            prop_assert!(fit(&rows, &targets, options).predict(&row).is_finite());
        }

        #[test]
        fn no_tree_increases_the_error((rows, targets) in table(), options in options()) {
            let mut last = f64::INFINITY;
            for trees in 0..8 {
                let model = fit(&rows, &targets, Options { trees, ..options });
                let now = loss(&model, &rows, &targets);
                prop_assert!(now <= last + 1e-9 * (1.0 + now), "{} after {}", now, last);
                last = now;
            }
        }
    }
}
