//! Public tables of pair speeds, i.e. how fast two jobs run on one GPU: Gavel's throughputs (OSDI
//! 2020), Lucid's co-location measurements (ASPLOS 2023), and a plain `a,b,speed_a,speed_b`.

use super::csv::{self, Header, Row};
use super::error::{Bad, Problem, TraceError};
use super::gavel::Throughputs;
use super::lines::Source;
use roommate_core::idx::{Idx, ProfileIdx};
use roommate_core::interference::table::Table;
use std::collections::BTreeMap;
use std::path::Path;

/// Speed of each job of a pair that was not measured or cannot run concurrently: time slicing.
const TAKE_TURNS: f64 = 0.5;

/// Mean pair speeds, by name.
#[derive(Clone, Debug, Default)]
pub struct Pairs {
    exact: BTreeMap<(String, String), Mean>,
    family: BTreeMap<(String, String), Mean>,
    /// Pairs of the file that cannot run concurrently.
    pub impossible: u64,
}

/// Sums of both speeds, and the number of measurements.
#[derive(Clone, Copy, Debug, Default)]
struct Mean([f64; 2], f64);

/// Reads one row: both names with their speeds relative to alone; `None` for rows of other GPU
/// models.
type PairReader = Box<dyn Fn(&Row<'_>) -> Result<Option<[(String, f64); 2]>, Bad>>;

/// Reads a table of pairs. Gavel's has throughputs, so it also needs those of the jobs alone.
pub fn read(path: &Path, alone: Option<&Path>, gpu_model: &str) -> Result<Pairs, TraceError> {
    let mut source = Source::open(path, "table of pairs")?;
    let header = csv::header(&mut source)?;
    let reader = layout(&source, &header, alone, gpu_model)?;
    let mut pairs = Pairs::default();
    csv::rows(&mut source, &header, ',', |source, row| {
        let read = row.map_err(Bad::from).and_then(&reader);
        match read.map_err(|bad| source.error_here(bad))? {
            Some([(_, a), (_, b)]) if a <= 0.0 || b <= 0.0 => pairs.impossible += 1,
            Some([a, b]) => pairs.add(&a, &b),
            None => {}
        }
        Ok(true)
    })?;
    if pairs.exact.is_empty() {
        return Err(source.whole_file(Problem::Empty));
    }
    Ok(pairs)
}

fn layout(
    source: &Source,
    header: &Header,
    alone: Option<&Path>,
    gpu_model: &str,
) -> Result<PairReader, TraceError> {
    let wrong = |problem| source.error_here(problem);
    let lucid = ["model1", "model2", "speed1", "speed2"];
    if header.has(&lucid) {
        return speeds(header, lucid).map_err(wrong);
    }
    if header.has(&["job_type", "other_job_type", "steps_per_s"]) {
        let alone = alone.ok_or_else(|| wrong(Problem::NoThroughputs))?;
        let alone = Throughputs::read(alone, gpu_model)?;
        return gavel(header, alone, gpu_model.to_owned()).map_err(wrong);
    }
    speeds(header, ["a", "b", "speed_a", "speed_b"]).map_err(wrong)
}

/// Reader of a table of relative speeds with these column names.
fn speeds(header: &Header, columns: [&'static str; 4]) -> Result<PairReader, Problem> {
    let [a, b, speed_a, speed_b] = header.require(columns)?;
    Ok(Box::new(move |row| {
        let side = |name, speed| Ok::<_, Bad>((row.text(name).to_owned(), row.number(speed)?));
        Ok(Some([side(a, speed_a)?, side(b, speed_b)?]))
    }))
}

/// Reader of Gavel's rows with this GPU model, consolidated workers, and as many GPUs for both
/// jobs.
fn gavel(header: &Header, alone: Throughputs, kind: String) -> Result<PairReader, Problem> {
    let [gpu, scale, a, rate_a, b, rate_b] = header.require([
        "gpu",
        "scale_factor",
        "job_type",
        "steps_per_s",
        "other_job_type",
        "other_steps_per_s",
    ])?;
    let (spread, other_scale) = (header.find("unconsolidated"), header.find("other_scale_factor"));
    Ok(Box::new(move |row| {
        let together = matches!(row.text_of(spread), None | Some("0"));
        let alike = row.text_of(other_scale).is_none_or(|s| s == row.text(scale));
        if row.text(gpu) != kind || !together || !alike || row.text(b).is_empty() {
            return Ok(None);
        }
        let gpus = row.gpus(scale)?;
        let side = |name, rate| {
            let (name, rate) = (row.text(name), row.number(rate)?);
            // Without the throughput alone, a pair has no relative speed.
            Ok::<_, Bad>(alone.step_s(name, gpus).ok().map(|s| (name.to_owned(), rate * s)))
        };
        Ok(side(a, rate_a)?.zip(side(b, rate_b)?).map(Into::into))
    }))
}

/// Pair speeds of profiles on each GPU model, from Gavel's throughput table: `profiles` are names
/// with their number of GPUs, and only profiles with the same number may share. Pairs of the table
/// that cannot run concurrently have speed 0.
pub fn by_gpu_model(
    path: &Path,
    kinds: &[&str],
    profiles: &[(&str, u32)],
) -> Result<Table, TraceError> {
    let mut source = Source::open(path, "throughput table")?;
    let header = csv::header(&mut source)?;
    let wrong = |problem, source: &Source| source.error_here(problem);
    let columns = header
        .require(["gpu", "scale_factor", "job_type", "steps_per_s"])
        .map_err(|p| wrong(p, &source))?;
    let [gpu, scale, name, rate] = columns;
    let [other, other_rate] =
        header.require(["other_job_type", "other_steps_per_s"]).map_err(|p| wrong(p, &source))?;
    // By GPU model, number of GPUs and names; the second name is empty for a job alone.
    let mut rates: BTreeMap<(u8, u32, String, String), [f64; 2]> = BTreeMap::new();
    csv::rows(&mut source, &header, ',', |source, row| {
        let take = || {
            let row = row.map_err(Bad::from)?;
            let kind = kinds.iter().position(|k| *k == row.text(gpu));
            let Some(kind) = kind else { return Ok(true) };
            let both = match row.text(other) {
                "" => [row.number(rate)?, 0.0],
                _ => [row.number(rate)?, row.number(other_rate)?],
            };
            let names = (row.text(name).to_owned(), row.text(other).to_owned());
            rates.insert((kind as u8, row.gpus(scale)?, names.0, names.1), both);
            Ok(true)
        };
        take().map_err(|bad: Bad| source.error_here(bad))
    })?;
    let mut pairs = BTreeMap::new();
    for kind in 0..kinds.len() as u8 {
        let rate = |gpus: u32, a: &str, b: &str| rates.get(&(kind, gpus, a.into(), b.into()));
        for (i, (a, gpus)) in profiles.iter().enumerate() {
            for (j, (b, width)) in profiles.iter().enumerate().skip(i) {
                let alone = |name: &str| rate(*gpus, name, "").map(|r| r[0]).filter(|r| *r > 0.0);
                let both = rate(*gpus, a, b).copied();
                let both = both.or_else(|| rate(*gpus, b, a).map(|[x, y]| [*y, *x]));
                if let (true, Some([x, y]), Some(x1), Some(y1)) =
                    (gpus == width, both, alone(a), alone(b))
                {
                    let key = (kind, ProfileIdx::from_usize(i), ProfileIdx::from_usize(j));
                    pairs.insert(key, [x / x1, y / y1]);
                }
            }
        }
    }
    Ok(Table::by_gpu_model(pairs))
}

impl Pairs {
    fn add(&mut self, (a, speed_a): &(String, f64), (b, speed_b): &(String, f64)) {
        // A speed above 1 (faster than alone) is noise.
        let speeds = [speed_a.min(1.0), speed_b.min(1.0)];
        let names = [(exactly(a), exactly(b)), (family(a), family(b))];
        for (table, (a, b)) in [&mut self.exact, &mut self.family].into_iter().zip(names) {
            let (key, speeds) =
                if a <= b { ((a, b), speeds) } else { ((b, a), [speeds[1], speeds[0]]) };
            let Mean(sums, count) = table.entry(key).or_default();
            sums.iter_mut().zip(speeds).for_each(|(sum, s)| *sum += s);
            *count += 1.0;
        }
    }

    /// Number of pairs of names with speeds.
    pub fn len(&self) -> usize {
        self.exact.len()
    }

    /// Whether the table has no pairs.
    pub fn is_empty(&self) -> bool {
        self.exact.is_empty()
    }

    /// Speeds of both jobs of a pair: of exactly these names, else the mean over their model
    /// families.
    pub fn speeds(&self, a: &str, b: &str) -> Option<[f64; 2]> {
        let look = |table: &BTreeMap<(String, String), Mean>, a: String, b: String| {
            let swapped = a > b;
            let key = if swapped { (b, a) } else { (a, b) };
            let Mean(sums, count) = *table.get(&key)?;
            let [first, second] = sums.map(|s| s / count);
            Some(if swapped { [second, first] } else { [first, second] })
        };
        look(&self.exact, exactly(a), exactly(b))
            .or_else(|| look(&self.family, family(a), family(b)))
    }

    /// The interference table of profiles with these names, and the number of them found in the
    /// table.
    pub fn table(&self, names: &[&str]) -> (Table, usize) {
        let mut pairs = BTreeMap::new();
        let mut known = vec![false; names.len()];
        for (i, a) in names.iter().enumerate() {
            for (j, b) in names.iter().enumerate().skip(i) {
                if let Some(speeds) = self.speeds(a, b) {
                    (known[i], known[j]) = (true, true);
                    pairs.insert((ProfileIdx::from_usize(i), ProfileIdx::from_usize(j)), speeds);
                }
            }
        }
        let known = known.into_iter().filter(|k| *k).count();
        (Table::new(pairs, TAKE_TURNS), known)
    }
}

/// Letters and digits only, in lower case: `ResNet-18` becomes `resnet18`.
fn exactly(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

/// The same without the batch size.
fn family(name: &str) -> String {
    exactly(name.split_once(" (").map_or(name, |(model, _)| model))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str, alone: Option<&str>) -> Result<Pairs, String> {
        let folder = tempfile::tempdir().unwrap();
        let (pairs, solo) = (folder.path().join("pairs.csv"), folder.path().join("solo.csv"));
        std::fs::write(&pairs, text).unwrap();
        std::fs::write(&solo, alone.unwrap_or_default()).unwrap();
        let pairs = read(&pairs, alone.map(|_| solo.as_path()), "v100");
        pairs.map_err(|e| e.problem.to_string())
    }

    #[test]
    fn all_three_layouts_give_speeds() {
        let own = read_text("a,b,speed_a,speed_b\nx,y,0.8,0.6\n", None).unwrap();
        assert_eq!(own.speeds("Y", "x"), Some([0.6, 0.8]));
        let lucid =
            "model1,dataset1,speed1,model2,speed2\nBERT,q,1.2,VGG-16,0.5\nBERT,q,0.6,VGG-16,0.7\n";
        let lucid = read_text(lucid, None).unwrap();
        assert_eq!(lucid.speeds("bert", "vgg16"), Some([0.8, 0.6]));
        let header = "gpu,unconsolidated,job_type,scale_factor,other_job_type,\
                      other_scale_factor,steps_per_s,other_steps_per_s";
        let rows = "v100,0,A (batch size 16),1,B,1,5,2\nv100,0,A (batch size 32),1,B,1,0,0\n\
                    k80,0,A (batch size 16),1,B,1,1,1\n";
        let alone = "gpu,job_type,scale_factor,steps_per_s\nv100,A (batch size 16),1,10\n\
                     v100,A (batch size 32),1,10\nv100,B,1,4\n";
        let gavel = read_text(&format!("{header}\n{rows}"), Some(alone)).unwrap();
        assert_eq!(gavel.speeds("A (batch size 16)", "B"), Some([0.5, 0.5]));
        assert_eq!(gavel.speeds("B", "A (batch size 64)"), Some([0.5, 0.5]), "by family");
        assert_eq!((gavel.impossible, gavel.len()), (1, 1));
    }

    #[test]
    fn a_table_without_pairs_is_refused() {
        let header = "gpu,unconsolidated,job_type,scale_factor,other_job_type,steps_per_s,\
                      other_steps_per_s\n";
        let refusals = [
            ("x,y\n1,2\n", "a"),
            (header, "throughput"),
            ("a,b,speed_a,speed_b\nx,y,fast,1\n", "fast"),
        ];
        for (text, word) in refusals {
            let refused = read_text(text, None).unwrap_err();
            assert!(refused.contains(word), "{text:?}: {refused}");
        }
    }

    #[test]
    fn unknown_pairs_are_time_sliced() {
        let own = read_text("a,b,speed_a,speed_b\nx,y,0.8,0.6\n", None).unwrap();
        let (table, known) = own.table(&["x", "y", "z"]);
        assert_eq!((table.speed_of(ProfileIdx(1), ProfileIdx(0)), known), (0.6, 2));
        assert_eq!(table.speed_of(ProfileIdx(2), ProfileIdx(0)), TAKE_TURNS);
    }
}
