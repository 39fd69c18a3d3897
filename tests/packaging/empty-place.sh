#!/bin/sh
# Installs one package where nothing of Roommate is, and runs the example there.
#
# usage: empty-place.sh wheel|deb|gnu|static FILE PYTHON SDK EXAMPLES
#
# Works below the current folder, which is empty; the deb is unpacked, not registered. SDK is the
# Python package for those that do not bring it.
set -eu
kind=$1 file=$2 python=$3 sdk=$4 examples=$5
case $kind in
  wheel)
    "$python" -m venv place
    place/bin/pip install --quiet --no-index --disable-pip-version-check "$file"
    bin=$PWD/place/bin ;;
  deb)
    mkdir place && dpkg-deb -x "$file" place
    bin=$PWD/place/usr/bin ;;
  gnu) mkdir place && tar xzf "$file" -C place && bin=$PWD/place/bin ;;
  static) mkdir place && tar xzf "$file" -C place && bin=$PWD/place ;;
esac
if [ "$kind" != wheel ]; then
  mkdir python && cp -r "$sdk" python/
  PYTHONPATH=$PWD/python && export PYTHONPATH
  mkdir names && ln -s "$python" names/python3 && PATH=$PWD/names:$PATH
fi
PATH=$bin:$PATH && export PATH
cp -r "$examples" examples
cd examples
echo "program: $(command -v roommate) $(roommate --version)"
python3 -c 'import roommate, sys; print("sdk:", roommate.__file__, sys.version.split()[0])'
roommate compare --cluster 4x8 --seed 7 -p fifo,tiresias -o json > compare.json
ROOMMATE_STATE=$PWD/../state roommate run mix.yaml -p mps --journal mix.jsonl -o json > mix.json
roommate replay mix.jsonl
