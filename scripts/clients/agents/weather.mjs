// The tool that clients of npm are given, and what they are asked: as weather.py has it.
import assert from 'node:assert/strict'

export const QUESTION = 'What is the weather in Ulm?'
export const RESULT = '21 degrees and sunny'
export const ANSWER = 'It is 21 degrees in Ulm.' // what the replayed model says once it has seen the result
export const DESCRIPTION = 'Say how the weather is in a city.'
export const SCHEMA = {
  type: 'object',
  properties: { city: { type: 'string', maxLength: 40 } },
  required: ['city'],
  additionalProperties: false,
}
export const PLACE = {
  type: 'object',
  properties: {
    name: { type: 'string', maxLength: 30 },
    inhabitants: { type: 'integer', minimum: 0, maximum: 100000000 },
  },
  required: ['name', 'inhabitants'],
  additionalProperties: false,
}
const asked = []

export function getWeather({ city }) {
  assert.equal(typeof city, 'string')
  asked.push(city)
  return RESULT
}

// Check that the tool was called once: with the replayed city, or, by a model under a grammar, with any.
export function checkCalled(mode) {
  assert.equal(asked.length, 1)
  if (mode === 'replayed') assert.deepEqual(asked, ['Ulm'])
  asked.length = 0
}

export function checkPlace(place, mode) {
  assert.deepEqual(Object.keys(place).sort(), ['inhabitants', 'name'])
  assert.ok(Number.isInteger(place.inhabitants))
  if (mode === 'replayed') assert.deepEqual(place, { name: 'Ulm', inhabitants: 126000 })
}
