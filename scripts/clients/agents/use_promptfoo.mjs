// promptfoo against a server: chats, tools, schemas, completions of which it asks for the best, conversations, errors.
import assert from 'node:assert/strict'
import promptfoo from 'promptfoo'
import { ANSWER, DESCRIPTION, PLACE, QUESTION, RESULT, SCHEMA, checkPlace } from './weather.mjs'

const [url, key, mode] = process.argv.slice(2)
const tools = [{ type: 'function', function: { name: 'get_weather', description: DESCRIPTION, parameters: SCHEMA } }]
const schema = { type: 'json_schema', json_schema: { name: 'town', schema: PLACE, strict: true } }

function provider(id, config) {
  return { id, config: { apiBaseUrl: `${url}/v1`, apiKey: key, max_tokens: 200, ...config } }
}

async function evaluate(prompt, id, config, tests) {
  const given = { prompts: [prompt], providers: [provider(id, config)], tests, writeLatestResults: false }
  const summary = await promptfoo.evaluate(given, { cache: false, maxConcurrency: 2, showProgressBar: false })
  const evaluated = 'toEvaluateSummary' in summary ? await summary.toEvaluateSummary() : summary
  assert.equal(evaluated.results.length, tests.length)
  return evaluated.results
}

async function passes(prompt, id, config, tests = [{ vars: {} }]) {
  const results = await evaluate(prompt, id, config, tests)
  for (const each of results) assert.ok(each.success, each.error)
  return results.map((each) => each.response.output)
}

async function fails(id, config, told) {
  const [result] = await evaluate('Hello.', id, config, [{ vars: {} }])
  assert.ok(!result.success)
  assert.match(result.error, told)
}

async function checkChat() {
  const hello = [{ assert: [{ type: 'equals', value: 'Hello, how are you?' }] }]
  await passes('Hello.', 'openai:chat:model', { temperature: 0 }, hello)
  await passes('Hello.', 'openai:chat:model', { stream: true }, hello)
  const [text] = await passes('Describe a town as JSON.', 'openai:chat:model', { response_format: schema }, [
    { assert: [{ type: 'is-json', value: PLACE }] },
  ])
  checkPlace(typeof text === 'string' ? JSON.parse(text) : text, mode)
}

// What a turn of a conversation gave is sent back in the next one, as promptfoo writes it.
async function checkConversation() {
  const prompt = `[
    {% for each in _conversation %}
    {"role": "user", "content": "{{ each.input }}"}, {"role": "assistant", "content": "{{ each.output }}"},
    {% endfor %}
    {"role": "user", "content": "{{ question }}"}
  ]`
  await passes(prompt, 'openai:chat:model', {}, [
    { vars: { question: 'Hello.' }, assert: [{ type: 'equals', value: 'Hello, how are you?' }] },
    { vars: { question: 'Have I been here?' }, assert: [{ type: 'equals', value: 'You have said hello before.' }] },
  ])
}

async function checkTools() {
  const [calls] = await passes(QUESTION, 'openai:chat:model', { tools, tool_choice: 'required' }, [
    { assert: [{ type: 'is-valid-openai-tools-call' }] },
  ])
  assert.equal(calls.length, 1)
  assert.deepEqual(JSON.parse(calls[0].function.arguments), { city: 'Ulm' })
  const answered = [
    { role: 'user', content: QUESTION },
    { role: 'assistant', content: null, tool_calls: calls },
    { role: 'tool', tool_call_id: calls[0].id, content: RESULT },
  ]
  await passes(JSON.stringify(answered), 'openai:chat:model', { tools }, [
    { assert: [{ type: 'equals', value: ANSWER }] },
  ])
}

// Its completions name best_of, 1 by default; one that is n is harmless, and another is refused by name.
async function checkCompletions() {
  for (const passthrough of [undefined, { n: 2, best_of: 2 }]) {
    const [text] = await passes('Hello.', 'openai:completion:model', { passthrough })
    assert.equal(text, 'Hello, how are you?')
  }
  await fails('openai:completion:model', { passthrough: { best_of: 3 } }, /best_of/)
}

await checkChat()
await checkConversation()
await checkTools()
await checkCompletions()
await fails('openai:chat:other', {}, /404|does not exist|not found/i)
await fails('openai:chat:model', { apiKey: 'wrong' }, /401|Unauthorized|key/i)
await fails('openai:chat:model', { temperature: -1 }, /temperature/)
process.exit(0) // it keeps its database open
